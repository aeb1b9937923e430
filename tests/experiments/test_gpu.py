"""Programs for a GPU: their names, their measures on a CPU, and what does not compile."""

import pytest

import gpu_measures as gpu
from gpu_programs import Program

pytestmark = pytest.mark.usefixtures("xla")
REACHED = {"multiply_adds": 1e12, "bytes": 1e12}


def test_multiply_adds_of_a_pair_are_those_of_its_equation():
    """Products of queries, keys and values, and three times them in training."""
    height, width, channels = 5, 7, 16
    pixels = 2 * height * width
    projections = 2 * pixels * channels * (8 + 8 + 16)  # queries and keys have half as many channels as values
    attention = pixels * (height + width) * (3 * 8 + 2 * 16)  # q k, q r, k r; the values and their positions
    assert gpu.multiply_adds(Program("", (2, height, width, channels))) == 3 * (projections + attention)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gpu, "HALF_A_SECOND", 0.01)


def test_a_measure_has_the_share_of_what_the_device_reaches():
    found = gpu.measure(Program("", (1, 3, 4, 16), training=False), REACHED)
    assert "failed" not in found and found["peak_bytes"] is None and found["runs"] == gpu.ROUNDS
    assert 0 < found["least_s"] <= found["median_s"] < found["compile_s"]
    assert found["of_products"] == pytest.approx(found["multiply_adds"] / found["median_s"] / 1e12)
    assert found["of_bandwidth"] == pytest.approx(found["bytes"] / found["median_s"] / 1e12)
    images = 3 * 4 * 16 * 2  # bytes
    assert 2 * images < found["bytes"] < 1000 * images
