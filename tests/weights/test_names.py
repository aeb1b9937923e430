"""Messages of assigning weights by name."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers.attention.layer import AxialAttention
from axial.weights.names import assign_weights, weight_names


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda v: v.pop("kernel"), "no value for the weight 'kernel'"),
        (lambda v: v.update(kernell=v.pop("kernel")), "did you mean 'kernel'"),
        (lambda v: v.update(kernel=np.zeros([1, 1])), "shape"),
    ],
)
def test_mismatches_are_named(change, words):
    layer = AxialAttention(8, 16, "width", name="attention")
    layer(tf.zeros([1, 2, 3, 4]))
    values = {name: np.full(w.shape, 0.5, np.float32) for name, w in weight_names(layer).items()}
    assign_weights(layer, values)
    assert all(np.all(w.numpy() == 0.5) for w in layer.weights)
    values = {name: value + 1 for name, value in values.items()}
    change(values)
    with pytest.raises(InputError, match=words):
        assign_weights(layer, values)
    assert np.all(layer.kernel.numpy() == 0.5)
