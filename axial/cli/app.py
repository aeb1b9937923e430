"""What all commands share: help, version, verbs, one-line errors and exit codes.

Commands define their flags at import. They import TensorFlow only in their main function, so that --help is fast.
"""

import dataclasses
import errno
import os
import sys
import textwrap
import typing

from absl import app, flags, logging

import axial
from axial.errors import InputError, NonFiniteError, Preempted, nearest

FLAGS = flags.FLAGS

BAD_INPUT = 2
PREEMPTED = 42
HELP = ("-h", "-help", "--help", "--helpshort", "-helpshort", "--helpfull", "-?")


@dataclasses.dataclass(frozen=True)
class Verb:
    """One thing that a command can do.

    Attributes:
        main: function of the arguments after the verb.
        flags: names of the flags that it takes.
        takes: name of its arguments in messages, like 'NAME'; '' if it takes none.
    """

    main: typing.Callable
    flags: tuple
    takes: str = ""


def run(main, module, takes=""):
    """Runs a command without verbs.

    Args:
        main: function of the arguments that are not flags.
        module: the command's module. Its docstring and flags are the help; '%s' in the docstring becomes the
            command's name.
        takes: see `Verb`.
    """
    names = tuple(flag.name for flag in FLAGS.get_flags_for_module(module.__name__))
    run_verbs({"": Verb(main, names, takes)}, module, default="")


def run_verbs(verbs, module, default=None):
    """Runs a command. On bad input it prints one line and exits with code 2. When preempted it exits with code 42.

    Args:
        verbs: dict from names to `Verb`s.
        module: see `run`.
        default: name of the verb that runs if the call names none; None if a call must name a verb.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    program = os.path.basename(sys.argv[0])
    own = {flag.name: flag for flag in FLAGS.get_flags_for_module(module.__name__)}

    def fail(message, code=BAD_INPUT):
        print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        sys.exit(code)

    def parse(argv):
        if argv[1:] in (["--version"], ["-version"]):  # axial-convert also has a flag of that name, with a value
            print(f"{program} {axial.__version__}")
            sys.exit(0)
        if set(HELP) & set(argv):
            named = [name for name in argv[1:] if name in verbs]
            print(_help(module, program, own, verbs[named[0]].flags if named else None))
            sys.exit(0)
        try:
            return FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            fail(f"unknown flag --{error.flagname}{nearest(error.flagname, own)}")
        except flags.Error as error:
            fail(error)

    def find_verb(arguments):
        """(`Verb`, its arguments)."""
        if arguments and arguments[0] in verbs:
            name, *arguments = arguments
        elif default is not None and (not arguments or verbs[default].takes):
            name = default
        else:
            named = [name for name in verbs if name]
            wrong = f": got {arguments[0]!r}{nearest(arguments[0], named)}" if arguments else ""
            fail(f"give one of {', '.join(named)}{wrong}" if named else f"takes no argument{wrong}")
        verb, call = verbs[name], f"{program} {name}".strip()
        for flag in own.values():
            if flag.present and flag.name not in verb.flags:
                takes = ", ".join(f"--{name}" for name in sorted(verb.flags))
                fail(f"--{flag.name}: {call} does not take it; it takes {takes}")
        if arguments and not verb.takes:
            fail(f"{call} takes no argument: got {arguments[0]!r}")
        return verb, arguments

    def guarded(argv):
        logging.set_verbosity(logging.ERROR)
        verb, arguments = find_verb(argv[1:])
        try:
            return verb.main(arguments)
        except InputError as error:
            fail(error)
        except NonFiniteError as error:
            fail(error, 1)
        except Preempted as error:
            fail(error, PREEMPTED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
                raise
            fail(f"{error.filename or 'output'}: {error.strerror}")
        except Exception as error:  # TensorFlow's errors, recognised without importing TensorFlow
            message = getattr(error, "message", "")
            if "No space left on device" in f"{message}{error}":
                fail("No space left on device; what was finished is kept")
            raise

    app.run(guarded, flags_parser=parse)


def _help(module, program, own, wanted):
    """The help of a command. If `wanted` names flags, the help has only these flags."""
    lines = [module.__doc__.strip().replace("%s", program), "", "flags:"]
    for name, flag in sorted(own.items()):
        if wanted is not None and name not in wanted:
            continue
        default = "" if flag.default in (None, [], "", False) else f" [{flag.default_as_str}]"
        lines.append(f"  --{name}")
        lines += textwrap.wrap(f"{flag.help}{default}", 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


# === Flags and their values ===


def flag(name):
    """The value of a flag. Raises InputError if the flag is not set."""
    value = FLAGS[name].value
    if value in (None, "", []):
        raise InputError(f"--{name} is needed: {FLAGS[name].help.rstrip('.')}")
    return value


def positive_numbers(name, texts):
    """Tuple of the numbers of a list flag. Raises InputError, which names the flag, unless all are positive."""
    try:
        values = tuple(float(text) for text in texts)
    except ValueError:
        values = ()
    if not values or not all(0 < value < float("inf") for value in values):
        raise InputError(f"--{name}={','.join(texts)}: expected positive numbers, as in 0.5,1,2")
    return values


def check_suffix(name, *suffixes):
    """Raises InputError unless the value of a flag is None or ends in one of the suffixes."""
    value = FLAGS[name].value
    if value and not value.lower().endswith(suffixes):
        raise InputError(f"--{name}={value}: its name must end in {' or '.join(suffixes)}")
