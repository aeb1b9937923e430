"""Small runs for the tests of the trainer."""

import glob
import os

import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from axial.layers.batch_norm import BatchNormConfig
from axial.training.optimizers import RAdamLookahead, WarmupPoly
from axial.training.trainer import TrainingConfig, train
from tests.conftest import make_task

SMALL = (33, 33)


def small_task(sample_dir, repeats=(1, 0, 0, 0), arguments=None, drop_path=0.0, **options):
    """The nano model with a single block, which compiles in seconds."""
    arguments = {"repeats": repeats, **(arguments or {})}
    model = {"norm": BatchNormConfig(momentum=0.9), "drop_path": drop_path, "arguments": arguments}
    return make_task(sample_dir, SMALL, model=model, **options)


def run(
    sample_dir,
    model_dir,
    steps=10,
    batch=2,
    *,
    strategy=None,
    rate=1e-3,
    task=None,
    profile=None,
    optimizer=None,
    change=(),
    **options,
):
    """Trains the small task. `optimizer` is a function that makes it, of a schedule."""
    strategy = strategy or tf.distribute.get_strategy()
    options = {"steps_per_loop": 2, "checkpoint_interval": 2, "eval_interval": 0, **options}
    with strategy.scope():
        built = (optimizer or RAdamLookahead)(WarmupPoly(rate, 50, 5))
    config = TrainingConfig(steps=steps, batch=batch, **options)
    task = task or small_task(sample_dir)
    return train(task, str(model_dir), built, config, strategy=strategy, profile=profile, change=change)


def curve(model_dir, tag="total"):
    """dict from steps to the last value that was written for each."""
    values = {}
    for path in sorted(glob.glob(os.path.join(model_dir, "events*")), key=os.path.getmtime):
        events = EventAccumulator(path, {"tensors": 0}).Reload()
        for event in events.Tensors(tag) if tag in events.Tags()["tensors"] else []:
            values[event.step] = float(tf.make_ndarray(event.tensor_proto))
    return values


def weights(model_dir):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(model_dir)))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith("model/")]
    return {n: reader.get_tensor(n) for n in names if "OBJECT" not in n}
