"""Operations without a kernel are found, on a device type that every TensorFlow has: that of XLA on a CPU."""

import types

import pytest
import tensorflow as tf

import ops
import tpu_compile
from axial.errors import InputError

CPU = "XLA_CPU_JIT"


def missing(function, *specs):
    return ops.check(ops.trace(function, list(specs)), ops.registered(CPU)).missing


def test_an_operation_without_a_kernel_is_named():
    found = missing(lambda x: tf.strings.length(tf.strings.as_string(x @ x)), tf.TensorSpec([8, 8]))
    assert found == {"AsString of float32": ["AsString"], "StringLength": ["StringLength"]}
    assert not missing(lambda x: x @ x, tf.TensorSpec([8, 8]))


def test_functions_that_are_called_count():
    @tf.function
    def inner(x):
        return tf.strings.length(tf.strings.as_string(x))

    def step(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: tf.zeros([8], tf.int32))

    found = missing(step, tf.TensorSpec([8]))
    assert list(found) == ["AsString of float32", "StringLength"]


def test_an_installation_without_kernels_is_refused():
    with pytest.raises(InputError, match="no TPU kernels"):
        ops.registered("XLA_NO_JIT")


@pytest.mark.slow
def test_a_step_of_a_recipe_has_all_kernels(monkeypatch):
    """A translator; published recipes run in minutes, where TensorFlow has TPU kernels."""
    registered = ops.registered
    monkeypatch.setattr(ops, "registered", lambda: registered(CPU))
    found = ops.operations_of("multi30k/transformer_nano.gin", "recipe")
    assert not found.missing and found.count > 1000 and not found.pallas


def test_the_command_names_what_is_missing(monkeypatch, capsys):
    lacking = ops.Operations(7, 3, 0, {"AsString of float32": ["a/AsString", "b/AsString"]})
    monkeypatch.setattr(ops, "registered", dict)
    monkeypatch.setattr(tpu_compile, "alone", lambda function, leaf, form: lacking)
    monkeypatch.setattr(ops, "FLAGS", types.SimpleNamespace(all=True, only="coco/axial_deeplab_s"))
    for name in ("refuse_without", "refuse_beside"):
        monkeypatch.setattr(ops.app, name, lambda *arguments: None)
    with pytest.raises(SystemExit) as stop:
        ops._main([])
    assert stop.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "coco/axial_deeplab_s.gin, recipe: 7 operations of 3 kinds, 0 calls of Pallas kernels",
        "  no TPU kernel: AsString of float32, 2 times, the first in a/AsString",
        "training steps: 1; 1 with operations without a TPU kernel",
    ]
    monkeypatch.setattr(ops.FLAGS, "only", "axial_q")
    with pytest.raises(InputError, match="--only=axial_q: no recipe has this in its name"):
        ops._main([])
