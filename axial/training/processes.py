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


def number_of(photos):
    """How many other processes score this number of photos: one for each core but that which feeds the device.

    Beside a network on the CPU one is enough: a photo takes that longer than its scores do.
    """
    most = 1 if device.on_cpu() else MOST
    return min(most, (os.cpu_count() or 1) - 1) if photos > FEW else 0


def scored(stream, scores, make, processes=0):
    """Adds a stream of photos to scores, while the stream goes on.

    Args:
        stream: iterable of (example, prediction).
        scores: `Metrics` of the photos so far.
        make: function of a shard (i, n) that returns empty `Metrics` of its photos; it can be pickled.
        processes: how many other processes score; 0 for this one.

    Yields:
        list of (example, what `Metrics.update` returns for it) of a few photos that were added, in order.
    """
    if not processes:
        for example, prediction in stream:
            yield [(example, scores.update(example, prediction))]
        return
    waiting, stream, number, step = collections.deque(), iter(stream), scores.next_number(), scores.shard[1]
    pool = loky.ProcessPoolExecutor(processes, initializer=_start, initargs=(os.getpid(),), env=_ENVIRONMENT)

    def added():
        examples, future = waiting.popleft()
        state, seen = future.result()
        metrics = make()
        metrics.restore(state)
        scores.merge(metrics)
        return list(zip(examples, seen))

    try:
        while photos := list(itertools.islice(stream, AT_ONCE)):
            examples, predictions = zip(*photos)
            labelled = [*zip(map(_labels, examples), predictions)]
            waiting.append((examples, pool.submit(_score, make, (number, step), labelled)))
            number += step * len(photos)
            while waiting and (waiting[0][1].done() or len(waiting) * AT_ONCE >= WAITING):
                yield added()
        while waiting:
            yield added()
    finally:
        pool.shutdown(kill_workers=True)


def _labels(example):
    """An example without the network's input, which no score needs."""
    return {name: value for name, value in example.items() if name != "image"}


def _start(parent):
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits for this one


def end_with(parent):
    """Ends this process soon after the one that started it, which may be killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _score(make, shard, photos):
    metrics = make(shard)
    seen = [metrics.update(example, prediction) for example, prediction in photos]
    return metrics.state(), seen
