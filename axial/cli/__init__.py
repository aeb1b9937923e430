"""The commands. Ctrl-C prints no traceback: this module handles it during a command's first imports, `app` later."""

import os
import sys


def _without_interrupts(kind, error, trace):
    """A `sys.excepthook` that prints nothing for KeyboardInterrupt, after which Python ends the process by SIGINT."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if os.path.basename(sys.argv[0]).startswith("axial-"):  # not in another program that imports axial.cli
    sys.excepthook = _without_interrupts
