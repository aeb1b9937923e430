"""In its window, each query sees every key of its neighbourhood exactly once."""

import numpy as np
import pytest

from axial.layers.attention.windows import SquareWindows, Windows


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
