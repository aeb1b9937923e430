"""What all commands share: help, version, verbs, one-line errors and exit codes.

Commands define their flags at import. They import TensorFlow only in their main function, so that --help is fast.
"""

import ast
import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import pkgutil
import re
import signal
import sys
import textwrap
import threading
import traceback

from absl import app, flags, logging

import axial
from axial.errors import NOT_UTF8, InputError, NonFiniteError, Preempted, bounded, check_docstrings, nearest
from axial.io.read import read_text
from axial.io.show import Closed, say

FLAGS = flags.FLAGS

BAD_INPUT = 2
FAULT = 70
PREEMPTED = 42
INTERRUPTED = 128 + signal.SIGINT  # as a shell has it of a program that the signal ended
CLOSED = 128 + signal.SIGPIPE
HELP = ("-h", "-help", "--help", "--helpshort", "-helpshort", "--helpfull", "-?")


def run(verbs, default=None, moved=()):
    """Runs a command.

    On bad input it prints one line and exits with code 2. When preempted it exits with code 42, after Ctrl-C with 130,
    and with 141 if nobody reads its output any more. A fault of axial itself prints its traceback and exits with code
    70.

    Args:
        verbs: dict from names to verbs; a command that has only one names it ''. A verb is a pair of its kind of
            `Flags` and a function of them, or the path of such a function in a module that imports TensorFlow. The
            docstring of the module of the flags is the help; '%s' in it becomes the command's name.
        default: name of the verb that runs if the call names none; None if a call must name a verb.
        moved: dict from verbs of before to the scripts of a clone that take their place.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for kind, _ in verbs.values():
        kind.define()
    command = _Command(os.path.basename(sys.argv[0]), verbs, "" if "" in verbs else default, dict(moved))
    _prepare_streams()
    sys.unraisablehook = _interrupt_again
    try:
        with _named_ends(command.program):
            app.run(command.work, flags_parser=command.parse)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of what Python does at its end
        for stream in (sys.stdout, sys.stderr):
            _end(stream)


@dataclasses.dataclass(frozen=True)
class _Command:
    """A command; see `run`."""

    program: str
    verbs: dict
    default: str | None
    moved: dict

    def parse(self, argv):
        """absl's `flags_parser`: the arguments that are no flags. Prints version and help."""
        for argument in argv[1:]:
            argument.encode()  # `describe` names one that is not UTF-8, which TensorFlow takes for no file
        if argv[1:] in (["--version"], ["-version"]):  # axial-convert also has a flag of that name, with a value
            say(f"{self.program} {axial.__version__}")
            sys.exit(0)
        if argv[1:] and argv[1] in self.moved:  # a later argument may be a folder of this name
            raise InputError(f"{argv[1]} is a script of a clone now: python experiments/{self.moved[argv[1]]}")
        every = {name: flag for kind, _ in self.verbs.values() for name, flag in kind.declared().items()}
        if set(HELP) & set(argv):
            named = [self.verbs[name][0].declared() for name in argv[1:] if name in self.verbs]
            say(*_help(next(iter(self.verbs.values()))[0], self.program, named[0] if named else every))
            sys.exit(0)
        try:
            return FLAGS([argv[0], *map(_at_home, argv[1:])])
        except flags.UnrecognizedFlagError as error:
            raise InputError(f"unknown flag --{error.flagname}{nearest(error.flagname, every)}") from None
        except flags.Error as error:
            raise InputError(error) from None

    def work(self, argv):
        """Runs the verb that the arguments name, after its flags are checked."""
        check_docstrings()
        logging.set_verbosity(logging.ERROR)
        name, arguments = self._find_verb(argv[1:])
        kind, function = self.verbs[name]
        given = kind.parsed(name, arguments)
        if isinstance(function, str):
            function = pkgutil.resolve_name(function)
            silence_xla()
        return function(given)

    def _find_verb(self, arguments):
        """(name of the verb, its arguments)."""
        name = self.default
        if arguments and arguments[0] in self.verbs:
            name, *arguments = arguments
        elif name is None or (arguments and not self.verbs[name][0].takes):
            named = [name for name in self.verbs if name]
            wrong = f": got {arguments[0]!r}{nearest(arguments[0], named)}" if arguments else ""
            raise InputError(f"give one of {', '.join(named)}{wrong}" if named else f"takes no argument{wrong}")
        call, kind = f"{self.program} {name}".strip(), self.verbs[name][0]
        for flag in sorted({flag for other, _ in self.verbs.values() for flag in other.names()} - kind.names()):
            if FLAGS[flag].present:
                takes = ", ".join(f"--{name}" for name in sorted(kind.declared()))
                raise InputError(f"--{flag}: {call} does not take it; it takes {takes}")
        if not arguments and kind.takes and not kind.takes.startswith("["):
            raise InputError(f"{call}: {kind.takes} is needed")
        if len(arguments) > bool(kind.takes) and not kind.takes.endswith("..."):
            raise InputError(f"{call} takes {kind.takes or 'no argument'}: got {arguments[-1]!r}")
        return name, arguments


@contextlib.contextmanager
def _named_ends(program):
    """Says in one line why a command failed, and ends it with its exit code."""
    try:
        try:
            yield
        except Closed:
            raise
        except (Exception, KeyboardInterrupt) as error:
            code, message = _end_of(error)
            say(bounded(f"{program}: {message}"), error=True)
            sys.exit(code)
    except Closed:
        sys.exit(CLOSED)


def _end_of(error):
    """(exit code, message) of what ended a command. Prints the traceback of a fault."""
    if isinstance(error, InputError):
        configuration = sys.modules.get("axial.recipes.configuration")  # if a command read a recipe
        return BAD_INPUT, configuration.with_macros(str(error)) if configuration else error
    if isinstance(error, NonFiniteError):
        return 1, error
    if isinstance(error, Preempted):
        gc.freeze()  # at its end Python would search a large model's graph for cycles, for seconds
        return PREEMPTED, error
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if reason := describe(error):
        return BAD_INPUT, reason
    say(*traceback.format_exc().splitlines(), error=True)
    return FAULT, f"this is a fault of axial {axial.__version__}; please report the lines above"


def _prepare_streams():
    """The standard streams are there, and take every text."""
    nowhere = functools.partial(open, os.devnull, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()  # closed before the start
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # something else stands for the stream
            stream.reconfigure(errors="backslashreplace")  # a locale may have few letters


def _interrupt_again(unraisable):
    """Sends Ctrl-C again where Python cannot raise it and would forget it, as inside a callback of jax's.

    Python calls that one whenever it collects garbage, and TensorFlow imports jax if it is installed.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _end(stream):
    """Flushes a standard stream. What it does not take goes to nowhere, as Python's own flush would fail on it."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _at_home(argument):
    """An argument --flag=~/x with the folder of the user, which a shell puts there only for ~/x alone."""
    return re.sub(r"^(--?\w+=)(~[^/]*)(?=/|$)", lambda match: match[1] + os.path.expanduser(match[2]), argument)


# What the system says of disks, limits, devices and remote file systems. Libraries wrap it in errors of any class.
_OF_THE_SYSTEM = re.compile(
    "No space left on device|Read-only file system|File too large|Too many open files|Input/output error|"
    "Cannot allocate memory|can't start new thread|Disk quota exceeded|Stale file handle|Remote I/O error|"
    "Connection timed out|Transport endpoint is not connected"
)


def describe(error):
    """One line for what the outside world does to a command: its files, its memory, its network.

    Returns:
        None if the error is a fault of axial.
    """
    message = str(error)
    if system := _OF_THE_SYSTEM.search(message):
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"{system[0]}{named}; what was finished is kept"
    if isinstance(error, MemoryError) or (_is_tensorflow_error(error) and "OOM" in message):
        return f"not enough memory ({' '.join(message.split())[:200] or 'the system gave no more'})"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or message}"
    if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)):  # of a name, as files are read by axial.io.read
        text = error.object if isinstance(error, UnicodeEncodeError) else error.object.decode(errors="surrogateescape")
        return f"{text[:1000]}: {NOT_UTF8}"
    if isinstance(error, (RecursionError, json.JSONDecodeError)) or _is_tensorflow_error(error):
        return f"{type(error).__name__}: {(message.splitlines() or ['no message'])[0]}"
    return None


def _is_tensorflow_error(error):
    """Whether TensorFlow's file systems, data or network raise it. A wrong argument is a fault of axial."""
    if "tensorflow" not in sys.modules:
        return False
    errors = sys.modules["tensorflow"].errors
    faults = errors.InvalidArgumentError, errors.InternalError, errors.UnimplementedError, errors.UnknownError
    away = "File system scheme" in str(error)  # a path like http://...
    return isinstance(error, errors.OpError) and (away or not isinstance(error, faults))


def silence_xla():
    """Hides XLA's notes, which TF_CPP_MIN_LOG_LEVEL does not reach. Imports TensorFlow."""
    import tensorflow as tf

    with contextlib.suppress(OSError, AttributeError):  # another build of TensorFlow; its notes stay
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
        name = "_ZN4absl12lts_2025012714SetMinLogLevelENS0_18LogSeverityAtLeastE"
        ctypes.CFUNCTYPE(None, ctypes.c_int)((name, library))(2)  # errors


def _help(kind, program, declared):
    """The lines of a command's help with some flags. The docstring is the file's: `python -OO` leaves no other."""
    about = ast.get_docstring(ast.parse(read_text(sys.modules[kind.__module__].__file__)))
    lines = [*about.replace("%s", program).splitlines(), "", "flags:"]
    for name, flag in sorted(declared.items()):
        values = flag.default if isinstance(flag.default, (list, tuple)) else [flag.default]
        default = f" [{','.join(map(str, values))}]" if flag.default not in (None, [], (), "", False) else ""
        several = " It may be given several times." if flag.kind is tuple else ""
        text = f"{flag.needed_meaning if flag.needed else flag.meaning}{several}{default}"
        lines.append(f"  --{name}")
        lines += textwrap.wrap(text, 80, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
    return lines
