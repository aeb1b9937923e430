"""Shared code of all commands: help, version, verbs, one-line errors and exit codes.

A command defines its flags at import. It imports TensorFlow only in its main function, so that --help is fast.
"""

import ast
import atexit
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
INTERRUPTED = 128 + signal.SIGINT  # the exit code that a shell reports for a program that this signal ended
CLOSED = 128 + signal.SIGPIPE
HELP = ("-h", "-help", "--help", "--helpshort", "-helpshort", "--helpfull", "-?")


def run(verbs, default=None, moved=()):
    """Runs a command.

    On bad input, the command prints one line and exits with code 2. It exits with 42 if it is preempted, with 130 after
    Ctrl-C, and with 141 if nobody reads its output any more. For a bug of axial, it prints the traceback and exits with
    70.

    Args:
        verbs: dict from the name of each verb to a pair: a subclass of `Flags`, and a function that takes its instance.
            A dotted path stands for a function in a module that imports TensorFlow. If a command has only one verb, the
            verb's name is ''. The help is the docstring of the module of the first `Flags`; '%s' in it becomes the
            command's name.
        default: name of the verb that runs if the user names none; None if the user must name a verb.
        moved: dict from names of former verbs to the scripts in experiments/ that replace them.
    """
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
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Python's shutdown prints no traceback
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
        """absl's `flags_parser`: returns the arguments that are not flags. Prints the version or the help."""
        for argument in argv[1:]:
            # TensorFlow opens only UTF-8 names. This raises for any other argument, and `describe` makes the message.
            argument.encode()
        if argv[1:] in (["--version"], ["-version"]):  # axial-convert has a flag --version=VALUE too
            say(f"{self.program} {axial.__version__}")
            sys.exit(0)
        if argv[1:] and argv[1] in self.moved:  # a later argument may be a folder with this name
            script = f"python experiments/{self.moved[argv[1]]}"
            raise InputError(f"{argv[1]} is no longer a verb; in a clone of axial's repository, run {script}")
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
        """Checks the flags of the verb that the arguments name, and runs it."""
        check_docstrings()
        logging.set_verbosity(logging.ERROR)
        name, arguments = self._find_verb(argv[1:])
        kind, function = self.verbs[name]
        given = kind.parsed(name, arguments)
        if isinstance(function, str):
            import_tensorflow()
            function = pkgutil.resolve_name(function)
        return function(given)

    def _find_verb(self, arguments):
        """Returns (name of the verb, its arguments)."""
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
                known = f"its flags are {takes}" if takes else "it has no flags"
                raise InputError(f"--{flag}: {call} does not take this flag; {known}")
        if not arguments and kind.takes and not kind.takes.startswith("["):
            raise InputError(f"{call}: {kind.takes} is needed")
        if len(arguments) > bool(kind.takes) and not kind.takes.endswith("..."):
            raise InputError(f"{call} takes {kind.takes or 'no argument'}: got {arguments[-1]!r}")
        return name, arguments


@contextlib.contextmanager
def _named_ends(program):
    """Prints one line that says why a command failed, and exits with its code."""
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
    """(exit code, message) for the exception that ended a command. Prints the traceback of a bug of axial."""
    if isinstance(error, InputError):
        configuration = sys.modules.get("axial.recipes.configuration")  # imported if the command reads recipes
        return BAD_INPUT, configuration.with_macros(str(error)) if configuration else error
    if isinstance(error, NonFiniteError):
        return 1, error
    if isinstance(error, Preempted):
        return PREEMPTED, error
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if reason := describe(error):
        return BAD_INPUT, reason
    say(*traceback.format_exc().splitlines(), error=True)
    return FAULT, f"this is a fault of axial {axial.__version__}; please report the lines above"


def _prepare_streams():
    """Replaces standard streams that are closed, and lets the others accept every text."""
    nowhere = functools.partial(open, os.devnull, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()  # None if the caller has closed it
    for stream in (sys.stdout, sys.stderr):
        # The stream may be an object without `reconfigure`, such as a caller's own.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # the locale may not encode all characters


def _interrupt_again(unraisable):
    """Sends SIGINT again if Python drops a KeyboardInterrupt, which happens inside some callbacks.

    Garbage collection calls such a callback of jax. TensorFlow imports jax if it is installed.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _end(stream):
    """Flushes a standard stream. On failure, discards the rest, so that Python's flush at exit does not fail too."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _at_home(argument):
    """Expands ~ in an argument --flag=~/x. A shell expands it only at the start of an argument."""
    return re.sub(r"^(--?\w+=)(~[^/]*)(?=/|$)", lambda match: match[1] + os.path.expanduser(match[2]), argument)


# System messages about disks, limits, devices and remote file systems. Libraries wrap them in errors of any class.
_OF_THE_SYSTEM = re.compile(
    "No space left on device|Read-only file system|File too large|Too many open files|Input/output error|"
    "Cannot allocate memory|can't start new thread|Disk quota exceeded|Stale file handle|Remote I/O error|"
    "Connection timed out|Transport endpoint is not connected"
)


def describe(error):
    """Describes an error of the environment (files, memory or network connections) in one line.

    Returns:
        The line, or None if the error is a bug of axial.
    """
    message = str(error)
    if system := _OF_THE_SYSTEM.search(message):
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"{system[0]}{named}; what was finished is kept"
    if isinstance(error, MemoryError) or (_is_tensorflow_error(error) and "OOM" in message):
        return f"not enough memory ({' '.join(message.split())[:200] or 'the system gave no more'})"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or message}"
    if isinstance(error, (UnicodeEncodeError, UnicodeDecodeError)):  # in a file name; axial.io.read handles contents
        text = error.object if isinstance(error, UnicodeEncodeError) else error.object.decode(errors="surrogateescape")
        return f"{text[:1000]}: {NOT_UTF8}"
    if isinstance(error, (RecursionError, json.JSONDecodeError)) or _is_tensorflow_error(error):
        return f"{type(error).__name__}: {(message.splitlines() or ['no message'])[0]}"
    return None


def _is_tensorflow_error(error):
    """Whether an error is from TensorFlow's file systems, data or connections, not from wrong arguments to an op."""
    if "tensorflow" not in sys.modules:
        return False
    errors = sys.modules["tensorflow"].errors
    faults = errors.InvalidArgumentError, errors.InternalError, errors.UnimplementedError, errors.UnknownError
    away = "File system scheme" in str(error)  # a path like http://...
    return isinstance(error, errors.OpError) and (away or not isinstance(error, faults))


@functools.cache
def import_tensorflow():
    """Imports TensorFlow and tf_keras for a command, and hides XLA's log messages.

    This leaves out packages that TensorFlow imports only where they are installed, and that take a third of the time:
    Keras 3 with scikit-learn, jax and pandas. TensorFlow's own Keras then is tf_keras. jax and pandas can still be
    imported later.
    """
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    left_out = {"jax", "pandas"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(left_out))  # None makes an import fail
    gc.disable()  # searching TensorFlow's modules for cycles would take half a second now, and more later
    try:
        import tensorflow  # noqa: F401
        import tf_keras  # noqa: F401
    finally:
        for name in left_out:
            del sys.modules[name]
        gc.freeze()
        atexit.register(gc.freeze)  # at exit, a search of a model's graph would take seconds
        gc.enable()
    silence_xla()


def silence_xla():
    """Hides XLA's log messages, which TF_CPP_MIN_LOG_LEVEL does not hide. Imports TensorFlow."""
    import tensorflow as tf

    with contextlib.suppress(OSError, AttributeError):  # another build of TensorFlow keeps its messages
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
        name = "_ZN4absl12lts_2025012714SetMinLogLevelENS0_18LogSeverityAtLeastE"
        ctypes.CFUNCTYPE(None, ctypes.c_int)((name, library))(2)  # errors


def _help(kind, program, declared):
    """The lines of a command's help with the given flags. Reads the docstring from the file: `python -OO` drops it."""
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
