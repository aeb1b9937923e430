"""Counts of multiply-adds equal counts by hand."""

import pytest
import tensorflow as tf

from axial.analysis.multiply_adds import activation_bytes, count_multiply_adds, total
from axial.layers.attention.layer import AxialAttention
from axial.layers.attention.windows import Windows


def count(function, *shapes):
    """Multiply-adds of a function of tensors with the given shapes."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return total(count_multiply_adds(tf.function(function, autograph=False).get_concrete_function(*specs).graph))


CASES = {
    "convolution": (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), [(2, 5, 6, 3), (3, 3, 3, 4)], 2 * 5 * 6 * 4 * 27),
    # Two groups: each of the 6 outputs reads 3 x 3 values of 2 of the 4 input channels.
    "grouped": (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), [(1, 5, 5, 4), (3, 3, 2, 6)], 25 * 6 * 18),
    # Each input channel gives two outputs of 9 multiply-adds.
    "depthwise": (
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 2, 2, 1], "SAME"),
        [(1, 5, 5, 4), (3, 3, 4, 2)],
        3 * 3 * 8 * 9,
    ),
    "matmul": (lambda a, b: tf.linalg.matmul(a, b, transpose_a=True), [(7, 3), (7, 5)], 3 * 7 * 5),
    "broadcast": (tf.matmul, [(4, 1, 3, 7), (2, 7, 5)], 8 * 3 * 7 * 5),
    "einsum": (lambda a, b: tf.einsum("blhd,bmhd->bhlm", a, b), [(2, 3, 4, 5), (2, 6, 4, 5)], 2 * 4 * 3 * 6 * 5),
    "ellipsis": (lambda a, b: tf.einsum("...ij,jk->...ik", a, b), [(2, 9, 3, 4), (4, 5)], 18 * 3 * 4 * 5),
    "summed letter": (lambda a, b: tf.einsum("ij,k->ik", a, b), [(3, 4), (5,)], 3 * 4 * 5),
    "element-wise": (lambda a: tf.nn.softmax(a * a + 1), [(3, 4)], 0),
}


@pytest.mark.parametrize("function,shapes,expected", CASES.values(), ids=CASES)
def test_hand_worked(function, shapes, expected):
    assert count(function, *shapes) == expected


def test_functions_are_followed():
    inner = tf.function(tf.matmul, autograph=False)
    assert count(lambda a, b: inner(inner(a, b), b), (3, 4), (4, 4)) == 2 * 3 * 4 * 4


def test_loops_count_as_often_as_they_run():
    def loop(a, b):
        def body(i, x):
            return (i + 1, tf.matmul(x, b))

        return tf.while_loop(lambda i, x: i < 5, body, [0, a], maximum_iterations=5)[1]

    assert count(loop, (3, 4), (4, 4)) == 5 * 3 * 4 * 4

    def endless(a, b):
        return tf.while_loop(lambda x: tf.reduce_sum(x) > 0, lambda x: [tf.matmul(x, b)], [a])[0]

    with pytest.raises(ValueError, match="maximum_iterations"):
        count(endless, (3, 4), (4, 4))


def test_the_dearer_branch_counts():
    def branch(a, b):
        def dear():
            return tf.matmul(tf.matmul(a, b), b)

        return tf.cond(tf.reduce_sum(a) > 0, lambda: tf.matmul(a, b), dear)

    assert count(branch, (3, 4), (4, 4)) == 2 * 3 * 4 * 4


@pytest.mark.parametrize("length,span", [(40, 5), (24, 65), (12, None)])
def test_a_local_span_counts_its_windows(length, span):
    """Eq. 4 has the projection and, for each query, five products with min(span, length) keys."""
    rows, channels = 3, 16
    layer = AxialAttention(channels, channels, "width", heads=2, span=span)
    graph = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec([1, rows, length, 8])).graph
    products = count_multiply_adds(graph)
    window = min(span or length, length)
    projection = rows * length * 8 * 3 * channels
    assert total(products) == projection + 5 * rows * length * window * channels
    windows = Windows(rows, length, "width", span)
    assert sum(p.computed for p in products) == (
        projection + 5 * rows * channels * windows.blocks * windows.queries * windows.keys
    )


def test_activations():
    def two(x, k):
        return tf.nn.relu(tf.reshape(tf.nn.conv2d(x, k, 1, "SAME"), [1, -1])) + tf.ones([100])

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1, 5, 5, 3])
        two(x, tf.ones([3, 3, 3, 4]))
    # The convolution, the ReLU and the sum count. A reshape and ops that do not depend on the image do not count.
    assert activation_bytes(graph, [x], lambda name: "all") == {"all": 3 * 400}
