"""Batch sizes for which the distributed predictor traces the network."""

import types

import numpy as np
import pytest
import tensorflow as tf

from axial.models.outputs import LOGITS
from axial.tasks import base
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.translation.input_pipeline import TextData
from axial.tasks.translation.task import TranslationTask


@pytest.fixture
def classifier():
    """(predictor of a network, list of the batch sizes for which the network has been traced)."""
    traced, weights = [], tf.random.stateless_normal([3, 5], [1, 2])

    def network(images):
        traced.append(images.shape[0])
        return {LOGITS: tf.reduce_mean(images, [1, 2]) @ weights}

    return ClassificationTask.predictions(None, network), traced


def photos(count):
    """List of examples with random images of 8x8 pixels."""
    images = tf.random.stateless_uniform([count, 8, 8, 3], [3, 4])
    return [{"image": image, "valid_size": tf.constant([8, 8])} for image in images]


def test_a_photo_alone_is_computed_once(classifier):
    predict, traced = classifier
    (example,) = photos(1)
    ((same, alone),) = predict([example])
    assert traced == [1] and same is example
    together = [prediction for _, prediction in predict([example] * 2)]
    assert traced == [1, 32]
    for prediction in together:
        np.testing.assert_allclose(alone["probability"], prediction["probability"], rtol=1e-6)


def test_a_tpu_has_one_graph(classifier, monkeypatch):
    monkeypatch.setattr(base, "has_tpu", lambda: True)
    predict, traced = classifier
    assert [len(list(predict(photos(count)))) for count in (1, 3, 40)] == [1, 3, 40] and traced == [32]


def test_a_sentence_alone_is_translated_once():
    computed = []

    def translate(model, source):
        computed.append(tuple(source.shape))
        return source[:, ::-1], tf.reduce_sum(tf.cast(source, tf.float32), 1)

    spec = types.SimpleNamespace(decode=lambda row: " ".join(str(token) for token in row if token))
    sentences = [{"ids": tf.constant(ids)} for ids in ([1, 2], [3, 4, 5, 6, 7], [8], [9, 1])]
    task = types.SimpleNamespace(spec=spec, data=TextData("train", "val", (4, 8)), translate=translate)
    predict = TranslationTask.predictions(task, None)
    for example, words in zip(sentences[:2], ("2 1", "7 6 5 4 3")):
        ((_, prediction),) = predict([example])
        assert prediction["translation"] == words and prediction["score"] == sum(example["ids"].numpy())
    assert computed == [(1, 4), (1, 8)]
    translations = [one["translation"] for _, one in predict(sentences)]
    assert translations == ["2 1", "7 6 5 4 3", "8", "1 9"] and computed == [(1, 4), (1, 8), (32, 4), (32, 8)]
