"""Scores photos in other processes, so that a device does not wait for the scores."""

import collections
import itertools
import os
import signal
import threading
import time

from joblib.externals import loky

from axial.layers import device

FEW = 500  # photos, which are scored before other processes have imported TensorFlow
AT_ONCE = 8  # photos that a process is given at a time
MOST = 16  # processes
WAITING = 128  # photos: some seconds of them, while the processes start, in 3.2 GB if they have 2048x1024 pixels

# A device belongs to the process that has opened it.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TPU_LOAD_LIBRARY": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
_own = {}  # what a process that scores was started with


def number_of(photos):
    """How many other processes score this number of photos: one for each core but that which feeds the device.

    Beside a network on the CPU one is enough: a photo takes that longer than its scores do.
    """
    most = 1 if device.on_cpu() else MOST
    return min(most, (os.cpu_count() or 1) - 1) if photos > FEW else 0


def scored(found, empty, *, before=0, processes=0):
    """Scores a stream of photos in parts, while the stream goes on.

    Args:
        found: iterable of (example, prediction).
        empty: function without arguments that returns empty `Scores`; it can be pickled.
        before: number of photos of the shard that come before these.
        processes: how many other processes score; 0 for this one.

    Yields:
        (`Scores` of a few photos, list of (example, what `Scores.update` returns for it)), in order.
    """
    if not processes:
        for example, prediction in found:
            part = empty()
            part.before, before = before, before + 1
            yield part, [(example, part.update(example, prediction))]
        return
    waiting, found = collections.deque(), iter(found)
    about = dict(initializer=_start, initargs=(empty, os.getpid()), env=_ENVIRONMENT)
    pool = loky.ProcessPoolExecutor(processes, **about)
    try:
        while photos := list(itertools.islice(found, AT_ONCE)):
            examples, predictions = zip(*photos)
            future = pool.submit(_score, before, [*zip(map(_labels, examples), predictions)])
            waiting.append((examples, future))
            before += len(photos)
            while waiting and (waiting[0][1].done() or len(waiting) * AT_ONCE >= WAITING):
                yield _part(empty, *waiting.popleft())
        while waiting:
            yield _part(empty, *waiting.popleft())
    finally:
        pool.shutdown(kill_workers=True)


def _labels(example):
    """An example without the network's input, which no score needs."""
    return {name: value for name, value in example.items() if name != "image"}


def _part(empty, examples, future):
    state, seen = future.result()
    part = empty()
    part.restore(state)
    return part, list(zip(examples, seen))


def _start(empty, parent):
    _own["empty"] = empty
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits for this one


def end_with(parent):
    """Ends this process soon after the one that started it, which may be killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _score(before, photos):
    part = _own["empty"]()
    part.before = before
    seen = [part.update(example, prediction) for example, prediction in photos]
    return part.state(), seen
