"""Monitoring of a training: its status file, requests to stop, steps that hang, and a profiler trace."""

import collections
import contextlib
import datetime
import faulthandler
import math
import os
import platform
import signal
import socket
import sys
import threading
import time

import numpy as np
import tensorflow as tf

import axial
from axial.errors import NonFiniteError, Preempted
from axial.io import metadata
from axial.io.read import first_line
from axial.io.schemas import STATUS
from axial.io.show import say
from axial.io.write import output_folder, write_json


@contextlib.contextmanager
def for_people(what):
    """A context for output that only people read. It prints an error as one line, and the training goes on."""
    try:
        yield
    except Exception as error:  # file systems, drawing and the profiler raise many types
        say(f"{what}: not written ({first_line(error)}); the training goes on", error=True)


def write_scalar(name, value, step):
    """Writes a scalar summary, from an array, because TensorFlow would cache every Python number for ever."""
    tf.summary.scalar(name, np.asarray(value, np.float32), step)


class Status(contextlib.AbstractContextManager):
    """status.json in the folder of a run: the progress and the speed of the training.

    A failing file system does not end the training. On exit, the context writes how the training ended.

    Args:
        path: the run's folder; None to write nothing.
        steps: number of steps of the whole training.
        batch: global batch size.
        step: the step that the training starts from.
    """

    SECONDS = 15  # between two attempts to write: a write to a bucket takes half a second

    def __init__(self, path, steps, batch, step=0):
        self.path, self.steps, self.batch, self._step = path, steps, batch, step
        self._state, self._tried, self._loops = "", -math.inf, collections.deque(maxlen=1000)

    def __exit__(self, kind, *_):
        state = {None: "done", Preempted: "preempted", NonFiniteError: "failed"}.get(kind)
        if state:
            self.write(state, self._step)

    def add_loop(self, steps, seconds, waited):
        """Adds a loop: its number of steps, its duration in seconds, and the seconds that it waited for input."""
        self._loops.append((seconds / steps, waited / seconds))

    def speed(self):
        """dict of seconds per step (median, 90th and 99th percentile over loops), images per second, and 'input_bound'.

        'input_bound' is the mean fraction of a loop's time spent on waiting for input. The dict is empty before a loop.
        """
        if not self._loops:
            return {}
        seconds, shares = zip(*self._loops)
        median, late, latest = map(float, np.percentile(seconds, (50, 90, 99)))
        return {
            "seconds_per_step": median,
            "seconds_per_step_p90": late,
            "seconds_per_step_p99": latest,
            "images_per_second": self.batch / median,
            "input_bound": float(np.mean(shares)),
        }

    def write(self, state, step):
        """Writes the file, unless the state is unchanged and the last attempt is less than `SECONDS` ago.

        Args:
            state: 'training', 'evaluating', 'done', 'preempted' or 'failed'.
            step: the current training step.
        """
        self._step, seconds = step, time.monotonic()
        if not self.path or (state == self._state and seconds - self._tried < self.SECONDS):
            return
        self._state, self._tried = state, seconds
        with for_people(path := os.path.join(self.path, STATUS)):
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            devices = collections.Counter(device.device_type for device in tf.config.list_logical_devices())
            machine = {
                "devices": ", ".join(f"{count} {kind}" for kind, count in sorted(devices.items())),
                "axial": axial.__version__,
                "tensorflow": tf.__version__,
                "python": platform.python_version(),
            }
            origin = {"updated": now, "host": socket.gethostname(), "machine": machine}
            write_json(path, {"state": state, "step": int(step), "steps": self.steps, **self.speed(), **origin})


class StopRequests:
    """Records SIGTERM, SIGINT, and on Google Cloud a notice of maintenance or preemption.

    A second SIGINT (Ctrl-C) ends the process at once, even while a step or a write hangs.

    Attributes:
        reason: text of the request; '' while there is none.
    """

    SECONDS = 2  # between two reads of Google Cloud's metadata
    INTERRUPTED = 130  # the exit code that shells give for SIGINT

    def __enter__(self):
        self.reason, self._over = "", threading.Event()
        self._old = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}
        # Python runs the handlers only after TensorFlow returns. The operating system writes to the pipe at once.
        receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._old_sender = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=[receiver], daemon=True).start()
        if metadata.host():
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def stop(self, step):
        """Raises Preempted. The caller has saved a checkpoint of this step."""
        reason = self.reason or "a request to another worker"
        raise Preempted(f"{reason}: saved at step {step}; the same command resumes")

    def _receive(self, number, _):
        self.reason = signal.Signals(number).name

    def _listen(self, receiver):
        count = 0
        with open(receiver, "rb", buffering=0) as signals:
            while numbers := signals.read(64):  # empty when the sender is closed
                for _ in range(numbers.count(signal.SIGINT)):
                    count += 1
                    does = "saves after this step, and ends at once if it comes again" if count == 1 else "ends at once"
                    with contextlib.suppress(OSError, ValueError):  # standard error may be gone
                        say("", f"SIGINT: {does}", error=True)
                    if count > 1:
                        os._exit(self.INTERRUPTED)

    def _watch(self):
        while not self._over.wait(self.SECONDS) and not self.reason:
            self.reason = metadata.notice() or self.reason  # a signal may have set the reason meanwhile

    def __exit__(self, *_):
        self._over.set()
        signal.set_wakeup_fd(self._old_sender)
        os.close(self._sender)
        for number, handler in self._old.items():
            signal.signal(number, handler)


def show_hangs(seconds):
    """Starts a timer that writes the stack of every thread to standard error every `seconds`.

    Another call restarts the timer. `faulthandler.cancel_dump_traceback_later` ends the timer.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may not be a file
        # The timer overflows for much longer times.
        faulthandler.dump_traceback_later(min(seconds, 1e9), repeat=True, file=sys.__stderr__)


class Profile(contextlib.AbstractContextManager):
    """A trace of some steps for TensorBoard's profiler.

    Args:
        path: the run's folder; None for a worker that writes no trace.
        steps: (first, last) step of the trace; None for no trace.

    Raises:
        InputError: a link would lead the trace out of the folder.
    """

    def __init__(self, path, steps):
        self.path, self.edges, self._running = path, (steps[0] - 1, steps[1]) if steps else (0, 0), False
        if path and steps:
            output_folder(path, "plugins/profile", "--profile")  # where TensorFlow writes the trace

    def bound(self, step, target):
        """The last step of a loop that begins at `step`: `target`, or the trace's start or end if this comes first.

        So a trace begins and ends between two loops. All workers get the same last step.
        """
        return min([target, *(edge for edge in self.edges if edge > step)])

    def at(self, step):
        """Begins or ends the trace between two loops. A resumed run traces the remaining steps."""
        first, last = self.edges
        if not first <= step < last:
            self.__exit__()
        elif self.path and not self._running:
            with for_people("the trace"):
                tf.profiler.experimental.start(self.path)
                self._running = True

    def __exit__(self, *_):
        """Writes the trace, if one is running."""
        if self._running:
            self._running = False
            with for_people("the trace"):
                tf.profiler.experimental.stop()
