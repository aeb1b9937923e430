"""Strategies, and the messages for devices that do not exist."""

import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.training import strategy
from axial.training.strategy import block_of, check_partitions, make_strategy


def test_default_and_mirrored():
    assert make_strategy().num_replicas_in_sync == 1
    if not tf.config.list_logical_devices("GPU"):
        assert make_strategy("mirrored").num_replicas_in_sync == 2  # the tests' two logical CPUs


def test_a_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(strategy, "SERVER_SECONDS", 0)
    with pytest.raises(InputError, match=r"--strategy=tpu --tpu=grpc.*: no TPU was found \("):
        make_strategy("tpu", "grpc://127.0.0.1:1")


def test_mirrored_without_gpus_names_the_flag(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    with pytest.raises(InputError, match="--strategy=mirrored: no GPU was found"):
        make_strategy("mirrored")


@pytest.mark.parametrize(
    "mesh,count,block",
    [
        ([2, 4, 1, 1], 2, [1, 2, 1, 1]),  # v5e, one core per chip: neighbouring chips
        ([2, 2, 1, 2], 2, [1, 1, 1, 2]),  # v3: the two cores of a chip
        ([2, 2, 1, 2], 4, [1, 2, 1, 2]),
        ([4, 4, 1, 1], 16, [4, 4, 1, 1]),
    ],
)
def test_cores_that_share_an_image_are_neighbours(mesh, count, block):
    assert block_of(mesh, count) == block


def test_partitions_need_a_tpu():
    with pytest.raises(InputError, match="TrainingConfig.partitions = 2: only with --strategy=tpu"):
        check_partitions(2, tf.distribute.get_strategy())
