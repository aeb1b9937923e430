"""Evaluation during training: its scores, pictures and summaries, and the best checkpoint so far."""

import contextlib
import faulthandler
import functools
import os
import typing

import msgspec
import numpy as np
import tensorflow as tf

from axial.data.streams import name_damaged_records
from axial.data.tfrecord import fingerprint, read_manifest
from axial.errors import InputError
from axial.io.read import read_existing, read_json
from axial.io.schemas import Count, Struct
from axial.io.write import file_digest, remove_folder
from axial.tasks.base import Inference
from axial.training.monitor import for_people, show_hangs, write_scalar
from axial.training.optimizers import averaged
from axial.training.saving import Saver, save_json
from axial.training.split_run import SplitRun
from axial.training.strategy import is_chief, total_over_workers

PICTURES = 4  # examples that each evaluation draws as image summaries


class Evaluated(Struct):
    """evaluated.json: the last step whose evaluation was finished. best/scores.json has these fields too.

    `evaluation` has the data and settings that the scores depend on. Older versions did not write this field.
    """

    step: Count
    evaluation: dict[str, typing.Any] | None = None


class Evaluations:
    """Evaluates during training. If there are several workers, the chief evaluates and the others wait for the chief.

    Args:
        loop: the `TrainStep` of the training.
        model_dir: folder of the run.
    """

    def __init__(self, loop, model_dir):
        self.loop, self.task, self.config, self.strategy = loop, loop.task, loop.config, loop.strategy
        self.model_dir = model_dir
        best, self.done_path = os.path.join(model_dir, "best"), os.path.join(model_dir, "evaluated.json")
        self.best_path, self.state_dir = os.path.join(best, "scores.json"), os.path.join(model_dir, ".evaluating")
        if self.config.eval_interval:
            self.saver = Saver(tf.train.Checkpoint(model=loop.model), best, 1, loop.strategy)

    def is_due(self, step):
        """Whether the training evaluates after this step."""
        interval = self.config.eval_interval
        return interval > 0 and step > 0 and (step % interval == 0 or step == self.config.steps)

    def is_done(self, step):
        """Whether the evaluation of this step, or a later one, was finished."""
        return self._decided(lambda: (done := self._read(self.done_path)) is not None and done.step >= step)

    def run(self, step, requests, writer=tf.summary.create_noop_writer):
        """Evaluates the weights, or their moving averages if any. Saves the model if its score is the best so far.

        Each scored example restarts the chief's hang timer. The other workers wait without a time limit.

        Args:
            step: the current training step.
            requests: `StopRequests`. After a stop, the resumed run scores only the remaining examples.
            writer: function without arguments that returns a summary writer.

        Returns:
            dict of the scores; empty for workers other than the chief.

        Raises:
            Preempted: this process was asked to stop.
        """

        def watch():
            show_hangs(self.config.hang_seconds)
            if requests.reason:
                requests.stop(step)

        chief = is_chief(self.strategy)
        if not chief:
            faulthandler.cancel_dump_traceback_later()
        with averaged(self.loop.optimizer, self.loop.model.trainable_variables):
            scores = self._scores(step, watch, writer) if chief else {}
            if self._decided(lambda: self._is_best(scores)):
                self.saver.save(step)
                if scores:
                    save_json(self.best_path, {"step": step, "evaluation": self._identity, **scores})
        if scores:
            save_json(self.done_path, {"step": step, "evaluation": self._identity})
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove_folder(self.state_dir)
        show_hangs(self.config.hang_seconds)
        return scores

    def _decided(self, decide):
        """The bool that `decide()` returns on the chief, for every worker. Every worker must call this method."""
        return bool(total_over_workers(self.strategy, is_chief(self.strategy) and decide()))

    def _scores(self, step, watch, writer):
        task, split, pictures = self.task, self.task.data.eval_split, []

        def draw(example, decoded):
            watch()
            if len(pictures) < PICTURES:
                pictures.append(None)
                with for_people("a picture"):
                    pictures[-1] = np.concatenate(task.evaluator.draw(example, decoded, task.spec), 1)[None]

        index = os.path.join(self.model_dir, f"ckpt-{step}.index")  # the index holds a checksum of every tensor
        weights = file_digest(index)[1] if tf.io.gfile.exists(index) else None
        identity = {"step": step, "weights": weights, **self._identity}
        run = SplitRun(task.evaluator, task.spec, split, identity, state_dir=self.state_dir)
        with name_damaged_records(task.data_dir, split):
            try:
                run.restore()
            except InputError:  # the state is damaged, or belongs to another step or training
                remove_folder(self.state_dir)
            total = read_manifest(task.data_dir, split)["examples"]
            scores = run.run(lambda shard, skip: task.eval_dataset(shard=shard, skip=skip), self._predict, total, draw)
        with for_people("summaries of the evaluation"), writer().as_default():
            for name, value in task.evaluator.summaries(scores).items():
                write_scalar(f"eval/{name}", value, step)
            for number, picture in enumerate(pictures):
                if picture is not None:
                    tf.summary.image(f"photo_truth_prediction/{number}", picture, step)
        return scores

    @functools.cached_property
    def _predict(self):  # traced once
        return self.task.predictions(self.loop.model, Inference(self.strategy, compiled=self.config.is_compiled()))

    @functools.cached_property
    def _identity(self):
        """dict of the data and settings that the scores depend on, with the types that decoded JSON has."""
        task = self.task
        identity = {"data": fingerprint(task.data_dir, task.data.eval_split), "canvas": task.canvas, **task.settings}
        return msgspec.json.decode(msgspec.json.encode(identity))

    def _read(self, path):
        """`Evaluated` of a file; None if the file is missing, or if it has an `evaluation` other than `_identity`."""
        evaluated = read_existing(path, Evaluated)
        return evaluated if evaluated and evaluated.evaluation in (None, self._identity) else None

    def _is_best(self, scores):
        """Whether the main score of `scores` is better than the best checkpoint's."""
        if not self._read(self.best_path):
            return True
        best = self.task.main_score(msgspec.to_builtins(read_json(self.best_path, self.task.best_scores)[1]))
        return best is None or not best >= self.task.main_score(scores)
