"""The table of compiled recipes, and the step times that pod.py predicts from the table."""

import dataclasses

import pytest

import pod
import tpu
from axial.errors import InputError
from axial.recipes import configuration

ROW = tpu.Row(
    "coco/axial_deeplab_s.gin",
    "v5e:4x8",
    "recipe",
    2,
    fits=True,
    used=2**33,
    limit=2**34,
    cycles=750_000_000,
    all_reduced=60_000_000,
    all_reduces=200,
    images=12_800_000,
    problems="",
)


def test_replicas_on_a_slice():
    assert tpu.replicas_of("v5e:4x4") == 16
    assert tpu.replicas_of("v4:2x2x2") == 8
    assert tpu.replicas_of("v3:2x2", partitions=4) == 2
    for name, words in (("v5e:4xx", "expected a shape"), ("v5f:2x2", "no TPU is called"), ("v5e:3x1", "has 3 devices")):
        with pytest.raises(InputError, match=words):
            tpu.replicas_of(name, 2)


def test_a_prediction_by_hand():
    predictions = {p["cores"]: p for p in pod.predict(ROW)}
    assert set(predictions) == {8, 16, 32, 64, 128, 256}  # the largest v5e slice
    prediction = predictions[32]
    assert (prediction["chips"], prediction["batch"], prediction["paper"]) == (32, 64, True)
    seconds, sums = 750e6 / (197e12 / 2 / 65536), 2 * 60e6 * 31 / 32 / 200e9 + 200 * 2 * 32**0.5 * 1e-6
    expected = {"compute": seconds, "reduce": sums, "step": seconds + sums, "efficiency": seconds / (seconds + sums)}
    assert {name: prediction[name] for name in expected} == pytest.approx(expected) and prediction["limit"] == "compute"
    assert prediction["host_images"] == pytest.approx(64 / 4 / (seconds + sums))
    assert pod.predict(dataclasses.replace(ROW, form="2 cores an image"))[2]["batch"] == 32


def test_rows_are_kept_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "tpu.csv"
    bad = dataclasses.replace(ROW, form="block recomputation", fits=False, problems="A B")
    for row in (bad, ROW):
        tpu.add_row(str(path), row)
    rows = {row.key: row for row in (bad, ROW)}
    assert tpu.read_table(str(path), tpu.Row) == rows
    assert "does not fit" in tpu.markdown(rows)
    largest = dataclasses.replace(ROW, slice="v5e:1x1", form="largest batch, kernels")
    assert tpu.markdown({**rows, None: largest}).splitlines()[-1].endswith("| 375 |")
    path.write_text(path.read_text().replace("750000000", "many"))
    with pytest.raises(InputError, match="tpu.csv:2: "):
        tpu.read_table(str(path), tpu.Row)


def test_hours_of_chips():
    """12.8 million images take as long in steps of 64 images on 32 chips as in steps of two images on one chip."""
    hours = 12.8e6 / 64 * ROW.seconds * 32 / 3600
    assert ROW.chip_hours == pytest.approx(hours)
    assert dataclasses.replace(ROW, slice="v5e:1x1").chip_hours == pytest.approx(hours)
    shared = dataclasses.replace(ROW, form="2 cores an image", batch=4)
    assert shared.chip_hours == pytest.approx(hours)
    megacore = dataclasses.replace(ROW, slice="v5p:2x4x4")  # a device of a v5p is a chip with two cores
    assert megacore.chip_hours == pytest.approx(12.8e6 / 64 * megacore.seconds * 32 / 3600)


def test_what_does_not_fit_gets_remedies_until_it_does(tmp_path):
    """In a stand-in for the compiler, only the form '2 cores an image' fits the memory."""
    made = tpu.compile_all(str(tmp_path / "tpu.csv"), stand_in, only="cityscapes/axial_deeplab_s.gin")
    assert [row.form for row in made.values() if row.fits] == ["2 cores an image"]
    assert set(tpu.read_table(str(tmp_path / "tpu.csv"), tpu.Row)) == set(made)
    forms = {form for _, slice_name, form in made if slice_name not in tpu.DEVICES}
    assert forms == {"recipe", "without kernels", "block recomputation", "2 cores an image"}


def stand_in(leaf, slice_name, form):
    return dataclasses.replace(ROW, leaf=leaf, slice=slice_name, form=form, fits=form == "2 cores an image")


@pytest.mark.parametrize("folder,classes", [("mapillary", 65), ("imagenet", 1000), ("nuclei", 2)])
def test_recipes_build_without_their_data(folder, classes, tmp_path):
    bindings = tpu.write_stand_in(folder, str(tmp_path))
    leaf = tpu.leaves(folder)[0]
    configuration.load([leaf], bindings)
    task, _, _ = configuration.build(data_dir=str(tmp_path))
    assert task.num_classes == classes
    shape = task.train_dataset(2, seed=0).element_spec["image"].shape
    assert shape[0] == 2 and shape[3] == 3
