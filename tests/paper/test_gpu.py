"""Programs for a GPU: their names, their measures on a CPU, and what does not compile."""

import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.layers import device
from axial.models.variants import VARIANTS
from axial.paper import gpu
from axial.paper.gpu_programs import PROGRAMS, QUICK, Program, find_programs

REACHED = {"multiply_adds": 1e12, "bytes": 1e12}


def test_every_program_has_a_name_of_its_own_and_a_model():
    for programs in (PROGRAMS, QUICK):
        names = [program.name for program in programs]
        assert len(set(names)) == len(names) and names[0].startswith("pair_")
        assert {program.model for program in programs} - {""} <= set(VARIANTS)
    assert {"axial_resnet_l_train_128", "axial_deeplab_s_train_1_block", "resnet_101_infer_1"} <= {
        program.name for program in PROGRAMS
    }


def test_programs_are_found_by_name_in_their_own_order():
    names = ["axial_deeplab_s_infer_1", "pair_65x129"]
    assert [program.name for program in find_programs(names)] == names[::-1]
    assert find_programs() == list(PROGRAMS) and find_programs(quick=True) == list(QUICK)
    with pytest.raises(InputError, match="did you mean 'pair_65x129'"):
        find_programs(["pair_65x192"])


def test_multiply_adds_of_a_pair_are_those_of_its_equation():
    """Products of queries, keys and values, and three times them in training."""
    height, width, channels = 5, 7, 16
    pixels = 2 * height * width
    projections = 2 * pixels * channels * (8 + 8 + 16)  # queries and keys have half as many channels as values
    attention = pixels * (height + width) * (3 * 8 + 2 * 16)  # q k, q r, k r; the values and their positions
    assert gpu.multiply_adds(Program("", (2, height, width, channels))) == 3 * (projections + attention)


@pytest.fixture(autouse=True, scope="module")
def xla():
    if not device.has_xla():
        pytest.skip("this TensorFlow has no XLA for CPUs")


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


def test_a_program_that_does_not_fit_does_not_end_the_others(monkeypatch):
    def step(program):
        if program is QUICK[1]:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory\nfor it")
        return (lambda x: [2 * x]), tf.TensorSpec([4])

    monkeypatch.setattr(gpu, "make_step", step)
    monkeypatch.setattr(gpu, "multiply_adds", lambda program: 8)
    lines, kept = [], []
    found = gpu.measure_all(QUICK[:3], quick=True, report=lines.append, keep=lambda result: kept.append(str(result)))
    assert [list(found["programs"][p.name]) == ["failed"] for p in QUICK[:3]] == [False, True, False]
    assert found["programs"][QUICK[1].name]["failed"] == "no memory"
    assert len(lines) == 7 and lines[3].startswith(f"{QUICK[1].name}: 2 of 3") and found["device"] == "CPU"
    assert lines[2].endswith(" ms") and lines[4] == f"{QUICK[1].name}: no memory"
    assert len(kept) == 3 and kept[2] == str(found) and QUICK[1].name not in kept[0]
