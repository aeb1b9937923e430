"""The translation task: its loss, averages of checkpoints, and errors."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.streams import photo_names
from axial.errors import InputError
from axial.models.registry import ModelConfig
from axial.tasks.base import Inference
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.tasks.translation.input_pipeline import TextData
from axial.tasks.translation.task import TranslationTask
from axial.training.optimizers import Adam, WarmupInverseSqrt
from axial.training.trainer import TrainingConfig, train
from axial.weights.restore import find_weights, restore_average
from tests.tasks.contract import eagerly

# A mechanism with a small graph. `test_transformer` tests the other mechanisms.
TINY = dict(layers=1, channels=16, inner=16, heads=2, encoder="none", decoder="0010", memory="0010")


def make(folder, model="transformer_nano"):
    data = TextData("train", "val", (16, 48))
    return TranslationTask(ModelConfig(model, arguments=TINY), data, folder, longer=4, beams=2)


def run(folder, model_dir, steps, **options):
    task = make(folder)
    optimizer = Adam(WarmupInverseSqrt(0.01, 2))
    options = dict(batch=192, steps_per_loop=1, checkpoint_interval=1, eval_interval=0) | options
    train(task, str(model_dir), optimizer, TrainingConfig(steps, **options))
    return task


@pytest.fixture(scope="module")
def trained(texts_dir, tmp_path_factory):
    """(task, folder) of a training run of two steps, which saves a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("translation")
    with eagerly():
        return run(texts_dir, folder, 2), folder


def test_the_loss_is_the_mean_over_real_tokens(trained):
    """The loss equals a loop over the target tokens of a batch, with smoothed labels and without padding."""
    task, _ = trained
    model = task.model.build(task.spec.num_classes, task.canvas, changes={"dropout": 0.0})
    batch = next(iter(task.train_dataset(96, seed=0)))
    loss = task.by_shape(lambda sentences: task.losses(model, sentences)["total"], batch).numpy()
    length = task.data.lengths[int(batch["bucket"][0])]
    source, target = (batch[name].numpy().reshape(-1, length) for name in ("source", "target"))
    logits = model({"source": source, "target": target})["logits"].numpy().astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = []
    for position in zip(*np.nonzero(target)):
        smooth = np.full(task.spec.num_classes, 0.1 / task.spec.num_classes)
        smooth[target[position]] += 0.9
        losses.append(-(smooth * logs[position]).sum())
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_weights_of_checkpoints_are_averaged(trained):
    task, folder = trained
    prefixes = find_weights(str(folder), 2)
    model = task.build_model()
    restore_average(model, prefixes)
    key = "model/embedding/.ATTRIBUTES/VARIABLE_VALUE"
    embeddings = [tf.train.load_checkpoint(prefix).get_tensor(key) for prefix in prefixes]
    assert (embeddings[0] != embeddings[1]).any()
    np.testing.assert_allclose(model.embedding, np.mean(embeddings, 0), rtol=1e-6)
    with pytest.raises(InputError, match=r"--average=9: .* has 2 checkpoints"):
        find_weights(str(folder), 9)


def test_what_is_refused(texts_dir, sample_dir, tmp_path):
    with pytest.raises(InputError, match="TrainingConfig.accumulate = 3: does not divide 4, a replica's rows of 48"):
        run(texts_dir, tmp_path / "run", 1, accumulate=3)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="a model for translation is expected"):
        make(texts_dir, "resnet_50")
    with pytest.raises(InputError, match="records with 'panoptic' labels; expected 'text'"):
        make(sample_dir)
    with pytest.raises(InputError, match="records with 'text' labels; expected 'panoptic'"):
        photo_names(texts_dir, "val")
    with pytest.raises(InputError, match="for photos; the task is translation"):
        make(texts_dir).predictions(None, Inference(flip=True))
    with pytest.raises(InputError, match="--data_service: for photos; the task is translation"):
        make(texts_dir).train_dataset(96, seed=0, service="grpc://x")
    with pytest.raises(InputError, match="a model for classification is expected"):
        ClassificationTask(ModelConfig("transformer_nano"), ClassificationData("train", "val"), texts_dir)
