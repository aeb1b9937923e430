"""Operations without a kernel are found, on a device type that every TensorFlow has: that of XLA on a CPU."""

import types

import pytest
import tensorflow as tf

from axial import recipes
from axial.cli import analyze_ops
from axial.errors import InputError
from axial.tpu_compiler import compile as tpu_compile
from axial.tpu_compiler import operations as tpu_ops
from axial.tpu_compiler.table import leaves

CPU = "XLA_CPU_JIT"


def missing(function, *specs):
    return tpu_ops.check(tpu_ops.trace(function, list(specs)), tpu_ops.registered(CPU)).missing


def test_an_operation_without_a_kernel_is_named():
    found = missing(lambda x: tf.strings.length(tf.strings.as_string(x @ x)), tf.TensorSpec([8, 8]))
    assert found == {"AsString of float32": ["AsString"], "StringLength": ["StringLength"]}
    assert not missing(lambda x: x @ x, tf.TensorSpec([8, 8]))


def test_a_kernel_must_take_the_types():
    assert not missing(lambda x: tf.equal(x, x), tf.TensorSpec([8]))
    assert missing(lambda x: tf.equal(x, x), tf.TensorSpec([8], tf.string)) == {"Equal of string": ["Equal"]}


def test_functions_that_are_called_count():
    @tf.function
    def inner(x):
        return tf.strings.length(tf.strings.as_string(x))

    def step(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: tf.zeros([8], tf.int32))

    found = missing(step, tf.TensorSpec([8]))
    assert list(found) == ["AsString of float32", "StringLength"]


def test_functions_that_nothing_calls_do_not_count():
    graph = tpu_ops.trace(lambda x: x + x, [tf.TensorSpec([8])])
    unused = tf.function(tf.strings.as_string).get_concrete_function(tf.TensorSpec([8]))
    graph.library.function.add().CopyFrom(unused.function_def)
    found = tpu_ops.check(graph, tpu_ops.registered(CPU))
    assert not found.missing and found.kinds == len({node.op for node in graph.node} - {"Placeholder"})


def test_an_installation_without_kernels_is_refused():
    with pytest.raises(InputError, match="no TPU kernels"):
        tpu_ops.registered("XLA_NO_JIT")


def test_a_step_of_a_recipe_has_all_kernels(monkeypatch):
    """A translator; published recipes run in minutes, where TensorFlow has TPU kernels."""
    registered = tpu_ops.registered
    monkeypatch.setattr(tpu_ops, "registered", lambda: registered(CPU))
    found = analyze_ops.operations_of("multi30k/transformer_nano.gin", "recipe")
    assert not found.missing and found.count > 1000 and not found.pallas


def test_the_command_names_what_is_missing(monkeypatch, capsys):
    lacking = tpu_ops.Operations(7, 3, 0, {"AsString of float32": ["a/AsString", "b/AsString"]})
    monkeypatch.setattr(tpu_ops, "registered", dict)
    monkeypatch.setattr(tpu_compile, "alone", lambda function, leaf, form: lacking)
    monkeypatch.setattr(analyze_ops, "FLAGS", types.SimpleNamespace(all=True, only="coco/axial_deeplab_s"))
    monkeypatch.setenv("TPU_LOAD_LIBRARY", "0")
    with pytest.raises(SystemExit) as stop:
        analyze_ops.run_ops([])
    assert stop.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "coco/axial_deeplab_s.gin, recipe: 7 operations of 3 kinds, 0 calls of Pallas kernels",
        "  no TPU kernel: AsString of float32, 2 times, the first in a/AsString",
        "training steps: 1; 1 with operations without a TPU kernel",
    ]
    monkeypatch.setattr(analyze_ops.FLAGS, "only", "axial_q")
    with pytest.raises(InputError, match="--only=axial_q: no recipe has this in its name"):
        analyze_ops.run_ops([])


def test_the_command_refuses_an_installation_without_tpu_kernels(command):
    try:
        tpu_ops.registered()
    except InputError as error:
        done = command("analyze", "ops")
        assert done.code == 2 and str(error) in done.line
    else:
        pytest.skip("this TensorFlow has TPU kernels")


def test_leaves_are_those_that_set_a_model():
    found = leaves(recipes.experiments_dir())
    assert {"sample/overfit.gin", "wmt14/transformer_base.gin", "coco/axial_deeplab_s.gin"} <= set(found)
    assert not [leaf for leaf in found if leaf.endswith(("/panoptic.gin", "/translation.gin"))]
