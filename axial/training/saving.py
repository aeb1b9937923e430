"""Writes the checkpoints of a run, from one or several processes, and lists new checkpoints for an evaluation."""

import functools
import glob
import os
import tempfile
import time

import tensorflow as tf

from axial.io import gfile
from axial.io.show import say
from axial.io.write import retried, sync, write_json, write_text
from axial.training.strategy import is_chief, total_over_workers
from axial.weights.checkpoint import is_unfinished, run_checkpoints


class Saver:
    """Writes the checkpoints of a `tf.train.Checkpoint` to a folder, and removes the oldest ones.

    If there are several workers, only the chief's checkpoints stay. The others must save too, because a save takes the
    means of the moving statistics over all replicas.

    TensorFlow writes a checkpoint under a temporary name, and its index last. So a half-written checkpoint is never
    restored (see `latest_checkpoint`), whether or not the file system can rename. In a local folder, the bytes are on
    disk before the list `checkpoint` names them and before the oldest checkpoint is removed; see `io.write`.

    Args:
        checkpoint: `tf.train.Checkpoint`.
        folder: folder of the checkpoints.
        keep: number of latest checkpoints to keep.
        strategy: `tf.distribute` strategy.
    """

    def __init__(self, checkpoint, folder, keep, strategy):
        gfile.check_plain(folder)
        self.folder, self.strategy, self._last, directory = folder, strategy, None, folder
        if is_chief(strategy):
            _list_checkpoints(folder)
        else:
            self._directory = tempfile.TemporaryDirectory()  # removed together with this object
            directory = self._directory.name
        self.manager = tf.train.CheckpointManager(checkpoint, directory, keep)

    def save(self, step):
        """Writes the checkpoint of a step, unless the last call wrote this step.

        While the file system fails, the call retries after growing waits.

        Raises:
            InputError: the last retry has failed.
        """

        def attempt():
            error = None
            try:
                self._write(step)
            except gfile.passing_errors() as caught:
                error = caught
            if total_over_workers(self.strategy, error is not None):  # either all workers retry or none
                raise error or tf.errors.UnavailableError(None, None, "another worker could not write")

        if step != self._last:
            retried(os.path.join(self.folder, f"ckpt-{step}"), attempt)
            self._last = step

    def _write(self, step):
        folder = self.manager.directory
        if gfile.is_remote(folder):
            self.manager.save(checkpoint_number=step)
            return
        files = os.path.join(glob.escape(folder), f"ckpt-{step}")
        for path in glob.glob(f"{files}[._]*"):
            if os.path.islink(path):
                os.remove(path)  # TensorFlow would write to the link's target

        def sync_files(prefix):  # TensorFlow calls this after the rename, before the list names the checkpoint
            for path in (*glob.glob(f"{files}.*"), folder):
                sync(path)

        options = tf.train.CheckpointOptions(experimental_write_callbacks=[sync_files])
        self.manager.save(checkpoint_number=step, options=options)
        for path in (os.path.join(folder, "checkpoint"), folder):
            sync(path)


def save_json(path, value):
    """Writes a file that a resumed training needs, by `write_json`. Retries while the file system fails."""
    retried(path, functools.partial(write_json, path, value))


def _list_checkpoints(folder):
    """Writes TensorFlow's list of checkpoints, the file `checkpoint`, from the checkpoints in a folder.

    A `tf.train.CheckpointManager` trusts the list, and removes the oldest checkpoints in it. In a copied run, the list
    may be missing or name other files.
    """
    path, names = os.path.join(folder, "checkpoint"), [os.path.basename(prefix) for prefix in run_checkpoints(folder)]
    if not names and tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)
    elif names:
        times = list(range(1, len(names) + 1))  # the manager never removes checkpoints whose timestamp is 0
        state = tf.compat.v1.train.generate_checkpoint_state_proto(os.curdir, names[-1], names, times)
        retried(path, functools.partial(write_text, path, str(state)))


# === Following a running training ===


def checkpoints(model_dir, last_step, timeout):
    """Yields (step, prefix) of a run's latest checkpoint, then of every newer one in order, until its last step.

    If the training removes a checkpoint before its turn, a line on standard error names it. TensorFlow's
    `checkpoints_iterator` skips checkpoints instead, as it always yields the latest one.

    Args:
        model_dir: folder of the run.
        last_step: function that returns the last step of the run's training.
        timeout: seconds to wait for the next checkpoint.
    """
    last, waiting, until = None, {}, time.monotonic() + timeout
    while last is None or last < last_step():
        complete = [prefix for prefix in run_checkpoints(model_dir) if not is_unfinished(prefix)]
        available = {int(prefix.rpartition("-")[2]): prefix for prefix in complete}
        for step in sorted(waiting.keys() - available.keys()):
            removed(waiting[step])
        waiting = {step: prefix for step, prefix in available.items() if last is None or step > last}
        if waiting:
            last = max(waiting) if last is None else min(waiting)
            yield last, waiting[last]
            waiting = {step: prefix for step, prefix in waiting.items() if step > last}
            until = time.monotonic() + timeout
        elif time.monotonic() > until:
            return
        else:
            time.sleep(1)


def removed(prefix):
    """Prints that a checkpoint was removed before it was evaluated."""
    say(f"{prefix}: was removed before its turn; a larger TrainingConfig.keep keeps more of them", error=True)
