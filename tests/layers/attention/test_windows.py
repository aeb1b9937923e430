"""In its window, each query sees every key of its neighbourhood exactly once."""

import numpy as np
import pytest
import tensorflow as tf

from axial.layers.attention.windows import SquareWindows, Windows, table_rows


@pytest.mark.parametrize("length,span", [(129, 65), (65, 65), (33, 65), (100, 3), (16, 5), (17, 5)])
def test_windows_show_each_query_the_keys_of_its_span(length, span):
    windows = Windows(1, length, "width", span)
    seen = np.zeros([length, length], int)
    visible = np.ones([1, length, length]) if windows.visible is None else windows.visible
    for block in range(windows.blocks):
        for i in range(windows.queries):
            query = block * windows.queries + i
            for j in np.flatnonzero(visible[block, i]):
                seen[query, query + windows.offsets[i, j]] += 1
    positions = np.arange(length)
    wanted = abs(positions[:, None] - positions[None, :]) <= span // 2
    np.testing.assert_array_equal(seen, wanted)
    assert windows.pairs == wanted.sum()


@pytest.mark.parametrize("windows", [Windows(3, 20, "width", 5), SquareWindows(5, 7, 3)])
def test_all_pairs_are_those_of_the_windows(windows):
    offsets, visible = windows.all_pairs()
    assert visible.sum() == windows.pairs and visible.shape == (windows.length, windows.length)
    assert np.abs(offsets[visible]).max() == windows.reach
    np.testing.assert_array_equal(offsets, -offsets.T)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("first", [-20, -3, 0, 20])
@pytest.mark.parametrize("count", [1, 4, 15])
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
