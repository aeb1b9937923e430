"""Small trainings for the tests of the trainer."""

import glob
import os

import tensorflow as tf
import tf_keras as keras
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tests.conftest  # noqa: F401, sets graph optimisation, also in processes that tests start
from axial.layers import BatchNorm, BatchNormConfig
from axial.models.outputs import LOGITS
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData
from axial.training import trainer
from axial.training.optimizers import RAdamLookahead, WarmupPoly
from axial.training.trainer import RunOptions, TrainingConfig, train
from tests.tasks.toy_task import ToyTask

SIDE = 16


class OneBlock(keras.Model):
    """A classifier of one convolution and a batch norm, which is quick to trace."""

    def __init__(self, classes, width):
        super().__init__(name="model")
        norm = BatchNorm(BatchNormConfig(momentum=0.9), name="norm")
        convolution = keras.layers.Conv2D(width, 3, 2, name="convolution")
        self.backbone = keras.Sequential([convolution, norm, keras.layers.MaxPool2D()], "backbone")
        self.head = keras.layers.Dense(classes, name="head", dtype="float32")

    def call(self, images, training=False):
        return {LOGITS: self.head(tf.reduce_mean(self.backbone(images, training=training), [1, 2]))}


class SmallTask(ToyTask):
    """Classifies photos by `OneBlock`. The images of the step `spoilt` are infinite."""

    width, spoilt = 4, None

    def build_model(self, folded=False):
        self.built = OneBlock(self.num_classes, self.width)
        self.built(tf.zeros([1, SIDE, SIDE, 3]))
        return self.built

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        def spoil(step, example):
            return {**example, "image": tf.where(first_step + step == self.spoilt, float("inf"), example["image"])}

        batches = super().train_dataset(batch, seed, first_step, context, service)
        return batches if self.spoilt is None else batches.enumerate().map(spoil)


def small_task(data_dir, width=4, spoilt=None, **data):
    """Returns a `SmallTask` on a data set like `colours_dir`."""
    task = SmallTask(ModelConfig("resnet_nano"), ClassificationData("train", "val", (SIDE, SIDE), **data), data_dir)
    task.width, task.spoilt = width, spoilt
    return task


def run(
    data_dir,
    model_dir,
    steps=10,
    batch=2,
    *,
    strategy=None,
    rate=1e-3,
    task=None,
    profile=None,
    optimizer=RAdamLookahead,
    change=(),
    **options,
):
    """Trains the small task and returns the scores. `optimizer` is a function that maps a schedule to a `Rule`."""
    strategy = strategy or tf.distribute.get_strategy()
    options = {"steps_per_loop": 2, "checkpoint_interval": 2, "eval_interval": 0, **options}
    config = TrainingConfig(steps=steps, batch=batch, **options)
    task = task or small_task(data_dir)
    how = RunOptions(strategy, profile=profile, change=change)
    return train(task, str(model_dir), optimizer(WarmupPoly(rate, 50, 5)), config, options=how)


class Begun(Exception):
    """Ends a training before its first step. The exception's arguments are the step's number and the `TrainStep`."""


def begin(*arguments, **options):
    """Calls `run`, and stops it before its first step. Returns (number of the step, `TrainStep`)."""
    kept = trainer.Evaluations

    def evaluations(loop, model_dir):
        raise Begun(int(loop.optimizer.iterations.numpy()), loop)

    trainer.Evaluations = evaluations
    try:
        run(*arguments, **options)
    except Begun as begun:
        return begun.args
    finally:
        trainer.Evaluations = kept


def curve(model_dir, tag="total"):
    """Returns a dict from each step to the last value of the summary `tag` at the step."""
    values = {}
    for path in sorted(glob.glob(os.path.join(model_dir, "events*")), key=os.path.getmtime):
        events = EventAccumulator(path, {"tensors": 0}).Reload()
        for event in events.Tensors(tag) if tag in events.Tags()["tensors"] else []:
            values[event.step] = float(tf.make_ndarray(event.tensor_proto))
    return values


def weights(model_dir, start="model/"):
    """Returns a dict from names that begin with `start` to the arrays in a run's latest checkpoint."""
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(model_dir)))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith(start)]
    return {n: reader.get_tensor(n) for n in names if "OBJECT" not in n}
