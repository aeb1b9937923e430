"""Strategies and precisions, and the messages for those that do not exist."""

import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.training.strategy import make_strategy, set_precision


def test_default_and_mirrored():
    assert make_strategy().num_replicas_in_sync == 1
    if not tf.config.list_logical_devices("GPU"):
        assert make_strategy("mirrored").num_replicas_in_sync == 2  # the tests' two logical CPUs


@pytest.mark.parametrize("name,words", [("tpu", "no TPU was found"), ("mirored", "did you mean 'mirrored'")])
def test_what_is_not_there(name, words):
    with pytest.raises(InputError, match=words):
        make_strategy(name)


def test_mirrored_without_gpus_names_the_flag(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    with pytest.raises(InputError, match="--strategy=mirrored: no GPU was found"):
        make_strategy("mirrored")


def test_unknown_precision():
    with pytest.raises(InputError, match="did you mean 'float32'"):
        set_precision("float23")
