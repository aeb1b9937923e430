"""Operations without a kernel are found, on a device type that every TensorFlow has: that of XLA on a CPU."""

import pytest
import tensorflow as tf

import ops
from axial.errors import InputError

CPU = "XLA_CPU_JIT"


def missing(function, *specs):
    return ops.check(ops.trace(function, list(specs)), ops.registered(CPU))[1]


def test_an_operation_without_a_kernel_is_named():
    found = missing(lambda x: tf.strings.length(tf.strings.as_string(x @ x)), tf.TensorSpec([8, 8]))
    assert found == {"AsString of float32": ["AsString"], "StringLength": ["StringLength"]}
    assert not missing(lambda x: x @ x, tf.TensorSpec([8, 8]))


def test_an_installation_without_kernels_is_refused():
    with pytest.raises(InputError, match="no TPU kernels"):
        ops.registered("XLA_NO_JIT")
