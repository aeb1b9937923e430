"""Checks that every task must pass. `test_contract.py` runs them for axial's tasks and for a toy task.

The tasks are as small as possible. The numbers that a task computes are tested in its own test files.
"""

import contextlib
import json
import shutil
import unittest.mock

import numpy as np
import tensorflow as tf
import tf_keras as keras

from axial.layers import device, random
from axial.serving.export import export
from axial.serving.parity import NUMBERS, QUALITY, prediction_differences
from axial.serving.predictor import Predictor
from axial.tasks.base import Inference
from axial.training.optimizers import Adam, NesterovMomentum
from axial.training.split_run import SplitRun, merge
from axial.training.train_step import TrainStep
from axial.training.trainer import TrainingConfig, train

# Relative tolerances of a train step compiled by XLA, which sums in another order: (for losses, for weight updates). A
# weight update is compared relative to its largest element.
TOLERANCES = 1e-5, 1e-3


@contextlib.contextmanager
def eagerly():
    """Runs tf.functions eagerly, except in tf.data. Tracing takes longer than the few steps of these tests."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def input_pipeline_resumes(task, batch):
    """Asserts that a training stream from step 2 on starts with the third batch of a whole stream. Returns batch 1."""
    whole = [_numpy(x) for x in task.train_dataset(batch, seed=1).take(3)]
    (third,) = (_numpy(x) for x in task.train_dataset(batch, seed=1, first_step=2).take(1))
    for name, value in whole[2].items():
        np.testing.assert_array_equal(third[name], value, err_msg=name)
    assert any(np.any(whole[0][name] != value) for name, value in whole[1].items())
    return {name: tf.constant(value) for name, value in whole[0].items()}


def run_resumes(task, batch, folder, **options):
    """Asserts that a run that resumes after step 1 ends with the same checkpoint as an uninterrupted run.

    Args:
        task: the task.
        batch: global batch size.
        folder: empty folder, to which both runs write.
        **options: arguments of `TrainingConfig`.
    """
    config = TrainingConfig(2, batch, eval_interval=0, checkpoint_interval=1, **options)
    train(task, str(folder / "whole"), Adam(0.01), config)
    shutil.copytree(folder / "whole", folder / "resumed")
    for path in (folder / "resumed").glob("ckpt-2.*"):
        path.unlink()
    train(task, str(folder / "resumed"), Adam(0.01), config)
    whole, resumed = (tf.train.load_checkpoint(str(folder / name / "ckpt-2")) for name in ("whole", "resumed"))
    names = [name for name in whole.get_variable_to_shape_map() if not name.startswith("_CHECKPOINTABLE")]
    assert len(names) > 3
    for name in names:  # weights, optimizer state and step
        np.testing.assert_array_equal(resumed.get_tensor(name), whole.get_tensor(name), err_msg=name)


def moved_by_a_step(task, batch, wish, strategy=None, **options):
    """Makes one SGD step at learning rate 1. Returns (dict of losses, dict of weight updates, which are -gradients)."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = task.build_model()
        tf.random.set_seed(None)  # `train` does the same
        optimizer = NesterovMomentum(1.0, momentum=0.0).build(model.trainable_variables)
    before = [w.numpy() for w in model.weights]
    loop = TrainStep(task, model, optimizer, TrainingConfig(1, batch, seed=1, jit_compile=wish, **options), strategy)
    assert loop.config.is_compiled() == (wish == "yes")
    loop.run(1)
    assert optimizer.iterations.numpy() == 1 and optimizer.bad_step.numpy() == -1
    moved = {w.name: w.numpy() - old for w, old in zip(model.weights, before, strict=True)}
    return {name: float(mean.result()) for name, mean in loop.sums.items()}, moved


def numbered(shape):
    """Replaces `random.uniform`. Returns float32 values in [0, 1) that are the same in a compiled and a plain step.

    TensorFlow's and XLA's generators give different numbers for the same key.
    """
    indices = tf.range(tf.reduce_prod(shape), dtype=tf.int32)
    return tf.reshape(tf.cast(tf.cast(indices, tf.int64) * 40503 % 65521, tf.float32) / 65521, shape)


def compiled_step_is_the_plain_one(task, batch, tolerances=TOLERANCES):
    """Asserts that a train step has the same losses and weight updates with XLA as without. Uses accelerators' ops."""
    loss_rtol, weight_rtol = tolerances
    with device.portable(), unittest.mock.patch.object(random, "uniform", numbered):
        (losses, moved), (compiled_losses, compiled) = (moved_by_a_step(task, batch, wish) for wish in ("no", "yes"))
    for name, value in losses.items():
        np.testing.assert_allclose(compiled_losses[name], value, loss_rtol, err_msg=name)
    assert any(np.any(value) for value in moved.values())
    for name, value in moved.items():
        np.testing.assert_allclose(compiled[name], value, weight_rtol, weight_rtol * np.abs(value).max(), err_msg=name)


def compiled_predictions_are_the_plain_ones(task, model, count=2):
    """Asserts that predictions with XLA equal predictions without. Both use the ops for accelerators."""
    results, examples = [], list(task.eval_dataset().take(count))
    for wish in ("no", "yes"):
        with device.portable():
            predictions = task.predictions(model, Inference(compiled=wish == "yes"))
            results.append([prediction for _, prediction in predictions(iter(examples))])
    for plain, compiled in zip(*results, strict=True):
        for name, value in plain.items():
            if value.dtype.is_integer:
                assert np.mean(value == compiled[name]) > 0.999, name
            else:
                np.testing.assert_allclose(compiled[name], value, 1e-4, 1e-5, err_msg=name)


def losses_are_named(task, model, batch):
    """Asserts that the losses of a batch are finite scalars named as in `loss_names`, and that counts are scalars."""
    losses = task.by_shape(lambda batch: task.losses(model, batch), batch)
    assert set(losses) == set(task.loss_names) and task.loss_names[-1] == "total"
    for name, value in losses.items():
        assert value.shape == () and np.isfinite(value), name
    if task.counted:
        counts = task.by_shape(lambda batch: task.counts(model, batch), batch)
        assert counts and all(value.shape == () for value in counts.values())


def predictions_keep_the_order(task, model, count=3):
    """Asserts that predictions come in the order of the examples. Returns a list of (example, prediction)."""
    examples = list(task.eval_dataset().take(count))
    pairs = list(task.predictions(model)(iter(examples)))
    assert [example for example, _ in pairs] == examples
    return pairs


def scores_merge(task, pairs):
    """Asserts that two shards' metrics, merged from JSON, equal the metrics of all pairs.

    Returns (metrics of all pairs, list of the decoded predictions).
    """
    whole, decoded = task.evaluator.metrics(task.spec), []
    for example, prediction in pairs:
        decoded.append(whole.update(example, prediction))
    shards = []
    for i in range(2):
        shard = task.evaluator.metrics(task.spec, (i, 2))
        for example, prediction in pairs[i::2]:
            shard.update(example, prediction)
        again = task.evaluator.metrics(task.spec, (i, 2))
        again.restore(json.loads(json.dumps(shard.state())))
        shards.append(again)
    shards[0].merge(shards[1])
    np.testing.assert_equal(shards[0].result(), whole.result())
    assert shards[0].photos == whole.photos and len(whole.photos) == len(pairs)
    assert all(len(photo) == 3 and (photo[2] is None or 0 <= photo[2] <= 1) for photo in whole.photos)
    assert isinstance(task.main_score(whole.result()), float)
    return whole, decoded


def tables_fit(task, result):
    """Asserts that the tables, headline and lines of a result have the form that `Evaluator` documents."""
    evaluator = task.evaluator
    headline, columns = evaluator.headline(result), evaluator.columns(result)
    assert headline and headline.keys() <= columns.keys() | headline.keys()
    assert all(isinstance(value, float) for value in (*headline.values(), *columns.values()))
    assert all(value == value for value in evaluator.summaries(result).values())
    header, rows, last = evaluator.classes(result)
    assert {len(row) for row in [*rows, *last]} <= {len(header)}
    assert all(isinstance(cell, str) for row in [header, *rows, *last] for cell in row)
    assert evaluator.brief(result) and evaluator.lines(result)[-1].split()[0].count("=") == 1
    if (mistakes := evaluator.mistakes(result)) is not None:
        header, rows = mistakes
        assert {len(row) for row in rows} <= {len(header)}


def results_are_read_back(task, pairs, folder):
    """Asserts that two shards write the same files as one run, and that stored predictions can be read and drawn."""

    def examples(shard, skip):
        return iter([example for example, _ in pairs][shard[0] :: shard[1]][skip:])

    def predictions(examples):
        prediction_by_id = {id(example): prediction for example, prediction in pairs}
        return ((example, prediction_by_id[id(example)]) for example in examples)

    def evaluate(name, shard):
        about = dict(results_dir=str(folder / name), data_dir=task.data_dir, shard=shard)
        run = SplitRun(task.evaluator, task.spec, task.data.eval_split, **about)
        return run, run.run(examples, predictions)

    run, result = evaluate("whole", (0, 1))
    for i in range(2):
        evaluate("parts", (i, 2))
    merged = merge(str(folder / "parts"), task.data.eval_split, lambda name, where: task.evaluator)
    np.testing.assert_equal(merged.metrics.result(), result)
    assert _files(folder / "whole") == _files(folder / "parts")
    for (example, _), decoded in zip(pairs, run.stored(), strict=True):
        pictures = task.evaluator.draw(example, decoded, task.spec)
        assert len(pictures) == len(task.evaluator.pictures)
        for picture in pictures:
            assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3


def given_is_described(task, model, pair):
    """Asserts that a prediction for an example's raw input has a `Description` with text, JSON and a picture."""
    example, _ = pair
    given = np.asarray(task.evaluator.given(example))[()]
    ((_, prediction),) = task.predictions(model)([task.example(tf.constant(given))])
    description = task.evaluator.describe(given, {k: np.asarray(v)[()] for k, v in prediction.items()}, task.spec)
    assert json.loads(json.dumps(description.content)) and isinstance(description.summary, str)
    assert description.draw().dtype == np.uint8


def exports_predict(task, model, example, folder):
    """Asserts that an exported model, loaded from its folder, gives the same predictions as the model."""
    given = np.asarray(task.evaluator.given(example))[()]
    given = given.decode() if isinstance(given, bytes) else given
    export(task, model, str(folder))
    predictor = Predictor.of_saved_model(str(folder))
    assert type(predictor.evaluator) is type(task.evaluator) and predictor.canvas == tuple(task.canvas)
    differences = prediction_differences(Predictor.of_task(task, model), predictor, [given])
    assert differences
    for name, value in differences.items():
        if name in NUMBERS:
            assert value < 1e-3, name
        elif name == QUALITY:
            assert value > 0.95 or np.isnan(value)  # NaN means no segment
        else:
            assert value > 0.95, name


def _numpy(batch):
    return {name: x.numpy() for name, x in batch.items()}


def _files(folder):
    """dict from relative paths of the files below a folder to their bytes. Leaves out hidden files."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
