"""Computes metrics in other processes, so that the accelerator does not wait for them."""

import collections
import itertools
import os
import signal
import threading
import time

from joblib.externals import loky

from axial.layers import device

FEW = 500  # number of examples that this process scores before other processes have imported TensorFlow
AT_ONCE = 8  # number of examples that one call to another process scores
MOST = 16  # largest number of further processes
WAITING = 128  # most examples in the queue: seconds of work while processes start; 3.2 GB for 2048x1024 pixels

# Only the process that opened an accelerator may use it.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TPU_LOAD_LIBRARY": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}


def number_of(examples):
    """Number of further processes that score `examples` examples: one per core, except the core of this process.

    If the network runs on the CPU, one further process is enough, as predicting takes longer than scoring.
    """
    most = 1 if device.on_cpu() else MOST
    return min(most, (os.cpu_count() or 1) - 1) if examples > FEW else 0


def scored(stream, scores, make, processes=0):
    """Adds a stream of predictions to metrics while the stream goes on.

    Args:
        stream: iterable of (example, prediction).
        scores: `Metrics` of the examples so far.
        make: picklable function that maps a shard (i, n) to empty `Metrics`.
        processes: number of further processes that score; 0 to score in this process.

    Yields:
        lists of (example, result of `Metrics.update` for this example), in the stream's order.
    """
    if not processes:
        for example, prediction in stream:
            yield [(example, scores.update(example, prediction))]
        return
    waiting, stream, number, step = collections.deque(), iter(stream), scores.next_number(), scores.shard[1]
    pool = loky.ProcessPoolExecutor(processes, initializer=_start, initargs=(os.getpid(),), env=_ENVIRONMENT)

    def added():
        examples, future = waiting.popleft()
        state, decoded = future.result()
        metrics = make()
        metrics.restore(state)
        scores.merge(metrics)
        return list(zip(examples, decoded))

    try:
        while pairs := list(itertools.islice(stream, AT_ONCE)):
            examples, predictions = zip(*pairs)
            # No metric needs the network's input.
            labels = [{name: x for name, x in each.items() if name != "image"} for each in examples]
            waiting.append((examples, pool.submit(_score, make, (number, step), [*zip(labels, predictions)])))
            number += step * len(pairs)
            while waiting and (waiting[0][1].done() or len(waiting) * AT_ONCE >= WAITING):
                yield added()
        while waiting:
            yield added()
    finally:
        pool.shutdown(kill_workers=True)


def _start(parent):
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process


def end_with(parent):
    """Ends this process soon after its parent process has ended, even if the parent was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _score(make, shard, pairs):
    metrics = make(shard)
    decoded = [metrics.update(example, prediction) for example, prediction in pairs]
    return metrics.state(), decoded
