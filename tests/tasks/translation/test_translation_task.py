"""The translation task: its loss and the average of checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.streams import photo_names
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.classification.feed import ClassificationData
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.translation.feed import TextData
from axial.tasks.translation.task import TranslationTask
from axial.training.optimizers import Adam, WarmupInverseSqrt
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import find_weights, restore_average
from tests.conftest import two_replicas

# The smallest graphs; `test_transformer` has the other mechanisms.
TINY = dict(layers=1, channels=16, inner=16, heads=2, encoder="none", decoder="0010", memory="0010")


def make(folder, model="transformer_nano", lengths=(16, 48), **options):
    options = dict(longer=4, beams=2) | options
    return TranslationTask(ModelConfig(model, arguments=TINY), TextData("train", "val", lengths), folder, **options)


def run(folder, model_dir, steps, strategy=None, *, lengths=(16, 48), **options):
    strategy = strategy or tf.distribute.get_strategy()
    task = make(folder, lengths=lengths)
    with strategy.scope():
        optimizer = Adam(WarmupInverseSqrt(0.01, 2))
    options = dict(batch=192, steps_per_loop=2, checkpoint_interval=2, eval_interval=0) | options
    train(task, str(model_dir), optimizer, TrainingConfig(steps, **options), strategy=strategy)
    return task


def latest(model_dir):
    reader = tf.train.load_checkpoint(str(model_dir))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name}


@pytest.fixture(scope="module")
def trained(texts_dir, tmp_path_factory):
    """A run of four steps with a checkpoint after every second."""
    folder = tmp_path_factory.mktemp("translation")
    return run(texts_dir, folder, 4), folder


@pytest.mark.slow
def test_two_replicas_train(texts_dir, tmp_path):
    run(texts_dir, tmp_path, 2, two_replicas(), lengths=(48,))
    assert all(np.isfinite(value).all() for value in latest(tmp_path).values())


def test_the_loss_is_the_mean_over_real_tokens(trained):
    task, _ = trained
    model = task.model.build(task.spec.num_classes, task.canvas, dropout=0.0)
    batch = next(iter(task.train_dataset(96, seed=0)))
    found = task.by_shape(lambda part: task.losses(model, part)["total"], batch).numpy()
    length = task.data.lengths[int(batch["bucket"][0])]
    source, target = (batch[name].numpy().reshape(-1, length) for name in ("source", "target"))
    logits = model({"source": source, "target": target})["logits"].numpy().astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = []
    for place in zip(*np.nonzero(target)):
        smooth = np.full(task.spec.num_classes, 0.1 / task.spec.num_classes)
        smooth[target[place]] += 0.9
        losses.append(-(smooth * logs[place]).sum())
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def test_weights_of_checkpoints_are_averaged(trained):
    task, folder = trained
    prefixes = find_weights(str(folder), 2)
    model = task.build_model()
    restore_average(model, prefixes)
    key = "model/embedding/.ATTRIBUTES/VARIABLE_VALUE"
    parts = [tf.train.load_checkpoint(prefix).get_tensor(key) for prefix in prefixes]
    assert (parts[0] != parts[1]).any()
    np.testing.assert_allclose(model.embedding, np.mean(parts, 0), rtol=1e-6)
    with pytest.raises(InputError, match=r"--average=9: .* has 2 checkpoints"):
        find_weights(str(folder), 9)


def test_a_text_is_drawn(trained):
    picture = trained[0].picture({"source": tf.constant("x"), "reference": tf.constant("y")}, "z" * 500)
    assert picture.dtype == np.uint8 and picture.shape[2] == 3


def test_what_is_refused(texts_dir, sample_dir):
    with pytest.raises(InputError, match="a model for translation is expected"):
        make(texts_dir, "resnet_50")
    with pytest.raises(InputError, match="records with 'panoptic' labels; expected 'text'"):
        make(sample_dir)
    with pytest.raises(InputError, match="records with 'text' labels; expected 'panoptic'"):
        photo_names(texts_dir, "val")
    with pytest.raises(InputError, match="for photos; the task is translation"):
        make(texts_dir).predictions(None, flip=True)
    with pytest.raises(InputError, match="a model for classification is expected"):
        ClassificationTask(ModelConfig("transformer_nano"), ClassificationData("train", "val"), texts_dir)


def test_parts_that_do_not_divide_the_rows_are_refused_before_anything_is_written(texts_dir, tmp_path):
    """192 tokens are 4 rows of 48. Three divides the tokens, but not the rows."""
    with pytest.raises(InputError, match="TrainingConfig.accumulate = 3: does not divide 4, a replica's rows of 48"):
        run(texts_dir, tmp_path / "run", 1, accumulate=3)
    assert not (tmp_path / "run").exists()
