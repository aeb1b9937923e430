"""How many photos or sentences are computed for those that are asked for."""

import types

import numpy as np
import pytest
import tensorflow as tf

from axial.models.outputs import LOGITS
from axial.tasks import replicated
from axial.tasks.classification.evaluation import classifier_predictions
from axial.tasks.translation.evaluation import translations


@pytest.fixture
def classifier():
    """Predictions of a network that keeps the batches that it is traced for, and those."""
    traced, weights = [], tf.random.stateless_normal([3, 5], [1, 2])

    def network(images):
        traced.append(images.shape[0])
        return {LOGITS: tf.reduce_mean(images, [1, 2]) @ weights}

    return lambda **options: classifier_predictions(network, **options), traced


def photos(count):
    images = tf.random.stateless_uniform([count, 8, 8, 3], [3, 4])
    return [{"image": image, "content": tf.constant([8, 8])} for image in images]


def test_a_photo_alone_is_computed_once(classifier):
    make, traced = classifier
    (example,) = photos(1)
    ((same, alone),) = make()([example])
    assert traced == [1] and same is example
    together = [found for _, found in make()([example] * 2)]
    assert traced == [1, 32]
    for found in together:
        np.testing.assert_allclose(alone["probability"], found["probability"], rtol=1e-6)


def test_a_tpu_has_one_graph(classifier, monkeypatch):
    monkeypatch.setattr(replicated, "has_tpu", lambda: True)
    make, traced = classifier
    predict = make(batch=4)
    assert [len(list(predict(photos(count)))) for count in (1, 3, 6)] == [1, 3, 6] and traced == [4]


def test_a_sentence_alone_is_translated_once():
    computed = []

    def translate(source):
        computed.append(tuple(source.shape))
        return source[:, ::-1], tf.reduce_sum(tf.cast(source, tf.float32), 1)

    spec = types.SimpleNamespace(decode=lambda row: " ".join(str(token) for token in row if token))
    sentences = [{"ids": tf.constant(ids)} for ids in ([1, 2], [3, 4, 5, 6, 7], [8], [9, 1])]
    predict = translations(translate, spec, lengths=(4, 8))
    for example, words in zip(sentences[:2], ("2 1", "7 6 5 4 3")):
        ((_, found),) = predict([example])
        assert found["translation"] == words and found["score"] == sum(example["ids"].numpy())
    assert computed == [(1, 4), (1, 8)]
    found = [one["translation"] for _, one in predict(sentences)]
    assert found == ["2 1", "7 6 5 4 3", "8", "1 9"] and computed == [(1, 4), (1, 8), (32, 4), (32, 8)]
