"""What every task holds to, as functions of a task. `test_contract.py` runs axial's tasks, and a toy, through them.

The tasks are as small as they can be. What a task computes is tested beside it.
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

# Relative tolerances of a compiled step, of losses and of the moves of a weight by its largest; XLA sums in another
# order.
TOLERANCES = 1e-5, 1e-3


@contextlib.contextmanager
def eagerly():
    """Without graphs but those of tf.data: tracing a network takes longer than its few steps here."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def input_pipeline_resumes(task, batch):
    """The stream from a step on is that of the whole stream. Returns its first batch."""
    whole = [_numpy(x) for x in task.train_dataset(batch, seed=1).take(3)]
    (third,) = (_numpy(x) for x in task.train_dataset(batch, seed=1, first_step=2).take(1))
    for name, value in whole[2].items():
        np.testing.assert_array_equal(third[name], value, err_msg=name)
    assert any(np.any(whole[0][name] != value) for name, value in whole[1].items())
    return {name: tf.constant(value) for name, value in whole[0].items()}


def run_resumes(task, batch, folder, **options):
    """A run that is killed after its first step and resumed has the checkpoint of one that is not.

    Args:
        **options: of `TrainingConfig`.
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
    for name in names:  # of weights, of the optimizer and of the step
        np.testing.assert_array_equal(resumed.get_tensor(name), whole.get_tensor(name), err_msg=name)


def moved_by_a_step(task, batch, wish, strategy=None, **options):
    """(losses, moves of the weights), dicts by name, of a step of descent at a rate of 1: weights move by gradients."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = task.build_model()
        tf.random.set_seed(None)  # as in `train`
        optimizer = NesterovMomentum(1.0, momentum=0.0).build(model.trainable_variables)
    before = [w.numpy() for w in model.weights]
    loop = TrainStep(task, model, optimizer, TrainingConfig(1, batch, seed=1, jit_compile=wish, **options), strategy)
    assert loop.config.is_compiled() == (wish == "yes")
    loop.run(1)
    assert optimizer.iterations.numpy() == 1 and optimizer.bad_step.numpy() == -1
    moved = {w.name: w.numpy() - old for w, old in zip(model.weights, before, strict=True)}
    return {name: float(mean.result()) for name, mean in loop.sums.items()}, moved


def numbered(shape):
    """For `random.uniform`: different float32 in [0, 1), the same in a compiled and in a plain step.

    TensorFlow's and XLA's generators make different numbers of the same key.
    """
    places = tf.range(tf.reduce_prod(shape), dtype=tf.int32)
    return tf.reshape(tf.cast(tf.cast(places, tf.int64) * 40503 % 65521, tf.float32) / 65521, shape)


def compiled_step_is_the_plain_one(task, batch, tolerances=TOLERANCES):
    """A step that XLA compiles in the accelerators' forms has the losses, gradients and statistics of a plain one."""
    of_loss, of_weight = tolerances
    with device.portable(), unittest.mock.patch.object(random, "uniform", numbered):
        (losses, moved), (found, compiled) = (moved_by_a_step(task, batch, wish) for wish in ("no", "yes"))
    for name, value in losses.items():
        np.testing.assert_allclose(found[name], value, of_loss, err_msg=name)
    assert any(np.any(value) for value in moved.values())
    for name, value in moved.items():
        np.testing.assert_allclose(compiled[name], value, of_weight, of_weight * np.abs(value).max(), err_msg=name)


def compiled_predictions_are_the_plain_ones(task, model, count=2):
    """Predictions that XLA compiles in the accelerators' forms have the plain ones' numbers, and classes of pixels."""
    found, examples = [], list(task.eval_dataset().take(count))
    for wish in ("no", "yes"):
        with device.portable():
            predictions = task.predictions(model, Inference(compiled=wish == "yes"))
            found.append([prediction for _, prediction in predictions(iter(examples))])
    for plain, compiled in zip(*found, strict=True):
        for name, value in plain.items():
            if value.dtype.is_integer:
                assert np.mean(value == compiled[name]) > 0.999, name
            else:
                np.testing.assert_allclose(compiled[name], value, 1e-4, 1e-5, err_msg=name)


def losses_are_named(task, model, part):
    """The losses of a batch are `loss_names`, finite scalars, and each part of the batch has the counts it needs."""
    found = task.by_shape(lambda part: task.losses(model, part), part)
    assert set(found) == set(task.loss_names) and task.loss_names[-1] == "total"
    for name, value in found.items():
        assert value.shape == () and np.isfinite(value), name
    if task.counted:
        counts = task.by_shape(lambda part: task.counts(model, part), part)
        assert counts and all(value.shape == () for value in counts.values())


def predictions_keep_the_order(task, model, count=3):
    """Each example comes back with its prediction. Returns the pairs."""
    examples = list(task.eval_dataset().take(count))
    pairs = list(task.predictions(model)(iter(examples)))
    assert [example for example, _ in pairs] == examples
    return pairs


def scores_merge(task, pairs):
    """Scores of two shards, stored as JSON and merged, are those of all photos. Returns (scores, what they saw)."""
    whole, seen = task.evaluator.metrics(task.spec), []
    for example, prediction in pairs:
        seen.append(whole.update(example, prediction))
    parts = []
    for i in range(2):
        part = task.evaluator.metrics(task.spec, (i, 2))
        for example, prediction in pairs[i::2]:
            part.update(example, prediction)
        again = task.evaluator.metrics(task.spec, (i, 2))
        again.restore(json.loads(json.dumps(part.state())))
        parts.append(again)
    parts[0].merge(parts[1])
    np.testing.assert_equal(parts[0].result(), whole.result())
    assert parts[0].photos == whole.photos and len(whole.photos) == len(pairs)
    assert all(len(photo) == 3 and (photo[2] is None or 0 <= photo[2] <= 1) for photo in whole.photos)
    assert isinstance(task.main_score(whole.result()), float)
    return whole, seen


def tables_fit(task, result):
    """Every short form of a result has the shape that `Evaluator` says."""
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
    """Results on disk are those of an evaluation in two shards; what was seen of a photo is read back and drawn."""

    def examples(shard, skip):
        return iter([example for example, _ in pairs][shard[0] :: shard[1]][skip:])

    def predictions(examples):
        known = {id(example): prediction for example, prediction in pairs}
        return ((example, known[id(example)]) for example in examples)

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
    for (example, _), seen in zip(pairs, run.stored(), strict=True):
        pictures = task.evaluator.draw(example, seen, task.spec)
        assert len(pictures) == len(task.evaluator.pictures)
        for picture in pictures:
            assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3


def given_is_described(task, model, pair):
    """What a predictor takes of an example has a prediction, and it says so in text, in JSON and as a picture."""
    example, _ = pair
    given = np.asarray(task.evaluator.given(example))[()]
    ((_, prediction),) = task.predictions(model)([task.example(tf.constant(given))])
    found = task.evaluator.describe(given, {k: np.asarray(v)[()] for k, v in prediction.items()}, task.spec)
    assert json.loads(json.dumps(found.content)) and isinstance(found.summary, str)
    assert found.draw().dtype == np.uint8


def exports_predict(task, model, example, folder):
    """The export of the model predicts what the model predicts. Nothing but its folder says what it is of."""
    given = np.asarray(task.evaluator.given(example))[()]
    given = given.decode() if isinstance(given, bytes) else given
    export(task, model, str(folder))
    predictor = Predictor.of_saved_model(str(folder))
    assert type(predictor.evaluator) is type(task.evaluator) and predictor.canvas == tuple(task.canvas)
    found = prediction_differences(Predictor.of_task(task, model), predictor, [given])
    assert found
    for name, value in found.items():
        if name in NUMBERS:
            assert value < 1e-3, name
        elif name == QUALITY:
            assert value > 0.95 or np.isnan(value)  # NaN: no segment at all
        else:
            assert value > 0.95, name


def _numpy(batch):
    return {name: x.numpy() for name, x in batch.items()}


def _files(folder):
    """dict from the names of the files below a folder to their content, without the states of evaluations."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
