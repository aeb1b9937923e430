"""Rows of position tables."""

import numpy as np
import pytest
import tensorflow as tf

from axial.layers.attention.windows import table_rows


@pytest.mark.parametrize("rows,first,count", [(1, -3, 4), (2, 0, 1), (9, -20, 15), (9, -3, 15), (9, -3, 4), (9, 20, 4)])
def test_neighbouring_rows_of_a_table_need_no_scatter(rows, first, count):
    random, offsets = np.random.default_rng(0), np.arange(first, first + count)
    index = np.clip(offsets + rows // 2, 0, rows - 1)
    table, weight = random.normal(size=[rows, 3]), random.normal(size=[count, 3])
    wanted = np.zeros_like(table)
    np.add.at(wanted, index, weight)

    @tf.function
    def step(table):
        with tf.GradientTape() as tape:
            tape.watch(table)
            found = table_rows(table, offsets)
            loss = tf.reduce_sum(found * weight)
        return found, tape.gradient(loss, table)

    found, gradient = step(tf.constant(table))
    np.testing.assert_array_equal(found, table[index])
    np.testing.assert_allclose(gradient, wanted, atol=1e-12)
    graph = step.get_concrete_function(tf.TensorSpec(table.shape, tf.float64)).graph
    assert not [op.name for op in graph.get_operations() if "Gather" in op.type or "Segment" in op.type]
