"""The steps that are asked of the TPU's compiler: of a recipe's training, and of a model that is served."""

import dataclasses

import tensorflow as tf
import tf_keras as keras

import tpu_compile
import tpu_table
from axial.chips import replicas_of
from axial.cli import app
from axial.serving.export import fold
from axial.tasks.segmentation.panoptic import segment_each
from axial.training.loop import Loop
from axial.training.trainer import check_batch, check_loop


def lowered_row(leaf, slice_name, form, batch=None):
    """(module, training, batch) of a training step of a recipe on a slice.

    Args:
        leaf, slice_name, form: see `tpu_table.Row`.
        batch: of each replica; None for the recipe's own.
    """
    with tpu_table.recipe_of(leaf, form) as build:
        training = build()[1]
        replicas = replicas_of(slice_name, training.partitions)
        batch = batch or max(training.batch // replicas, 1)
        return tpu_compile.lower(*training_step(build, batch, replicas, slice_name), slice_name), training, batch


def training_step(build, batch, replicas, slice_name):
    """(function, specs) of a training step of one replica.

    Args:
        build: function that takes nothing and returns (task, training, optimizer).
        batch: of each replica.
        replicas: of the slice.
        slice_name: like 'v5e:4x4', or `compile.CPU`.

    Raises:
        InputError: `TrainingConfig.accumulate` does not divide the batch.
    """
    strategy = tpu_compile.SliceStrategy(replicas)
    with strategy.scope(), tpu_compile.forms(slice_name):
        task, training, optimizer = build()
        row = task.row
        check_batch(dataclasses.replace(training, batch=batch * replicas), replicas, row)
        keras.mixed_precision.set_global_policy(training.precision)
        model = task.build_model()
        check_loop(task, model, training, strategy)
        loop = Loop(task, model, optimizer.build(model.trainable_variables), training, strategy=strategy)
    spec = task.train_dataset(batch, training.seed).element_spec
    return lambda batch: strategy.run(loop.replica_step, (batch,)), [spec]


def lowered(build, batch, replicas, slice_name, mode):
    """Serialised module of a step of one replica; see `training_step`. `mode` is the flag."""
    app.silence_xla()
    if mode == "serve":
        step, specs = _serving_step(build()[0], batch)
    else:
        step, specs = training_step(build, batch, replicas, slice_name)
    return tpu_compile.lower(step, specs, slice_name)


def _serving_step(task, batch):
    """(function, specs) of an exported model, from canvases to panoptic maps."""
    folded = fold(task, task.build_model())
    return lambda images: segment_each(task, folded, images), [tf.TensorSpec([batch, *task.canvas, 3])]
