"""The commands. Ctrl-C ends one without a traceback: here while it imports its first modules, later in `app`."""

import os
import sys


def _without_interrupts(kind, error, trace):
    """Python's `sys.excepthook` for all but KeyboardInterrupt. Python then ends the process by SIGINT."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if os.path.basename(sys.argv[0]).startswith("axial-"):  # not in a program that imports this
    sys.excepthook = _without_interrupts
