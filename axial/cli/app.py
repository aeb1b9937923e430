"""What every command does alike: help, one-line errors and exit codes.

Commands define their flags at import and import TensorFlow only in their main function, so that
--help answers at once.
"""

import errno
import os
import sys

from absl import app, flags, logging

from axial.errors import InputError, NonFiniteError, Preempted, nearest

FLAGS = flags.FLAGS

PREEMPTED = 42
BAD_INPUT = 2


def positive_numbers(name, texts):
    """Tuple of the positive numbers of a list flag; InputError names the flag."""
    try:
        values = tuple(float(text) for text in texts)
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise InputError(f"--{name}={','.join(texts)}: expected positive numbers, as in 0.5,1,2")
    return values


def run(main, module):
    """Runs a command: exit code 2 and one line on bad input, 42 when preempted.

    Args:
        main: function of the arguments that are not flags.
        module: the command's module, whose docstring and flags are its help.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    program = os.path.basename(sys.argv[0])
    sys.modules["__main__"].__doc__ = module.__doc__.replace("%s", program)
    for flag in FLAGS.get_flags_for_module(module.__name__):
        FLAGS.register_key_flag_for_module(sys.argv[0], flag)

    def fail(message, code):
        print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        sys.exit(code)

    def parse(argv):
        try:
            return FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            known = [flag.name for flag in FLAGS.get_key_flags_for_module(sys.argv[0])]
            fail(f"unknown flag --{error.flagname}{nearest(error.flagname, known)}", BAD_INPUT)
        except flags.Error as error:
            fail(error, BAD_INPUT)

    def guarded(argv):
        logging.set_verbosity(logging.ERROR)
        try:
            return main(argv[1:])
        except InputError as error:
            fail(error, BAD_INPUT)
        except NonFiniteError as error:
            fail(error, 1)
        except Preempted as error:
            fail(error, PREEMPTED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
                raise
            fail(f"{error.filename or 'output'}: {error.strerror}", BAD_INPUT)
        except Exception as error:  # TensorFlow's errors, known without importing it
            message = getattr(error, "message", "")
            if "No space left on device" in f"{message}{error}":
                fail("No space left on device; what was finished is kept", BAD_INPUT)
            raise

    app.run(guarded, flags_parser=parse)
