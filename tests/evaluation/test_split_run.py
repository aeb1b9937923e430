"""A killed evaluation resumes, and shards add up. Scores, results and report are the same to the last bit."""

import pathlib
import shutil

import numpy as np
import pytest

from axial.data.pipeline import evaluation_dataset
from axial.data.specs import COCO
from axial.errors import InputError
from axial.evaluation.panoptic import PANOPTIC
from axial.evaluation.report import Report
from axial.evaluation.split_run import SplitRun, merge
from truths import shifted


@pytest.fixture(scope="module")
def examples(sample_dir):
    cache = {}

    def read(shard, skip):
        if (shard, skip) not in cache:
            cache[shard, skip] = list(evaluation_dataset(sample_dir, "val2017", COCO, (17, 17), shard=shard, skip=skip))
        return cache[shard, skip]

    return read


def make_run(folder, shard=(0, 1), interval=0, **identity):
    report = Report(PANOPTIC, str(folder / "report"), "val2017", COCO, count=2)
    options = dict(report=report, shard=shard, identity=identity, interval=interval)
    return SplitRun(PANOPTIC, COCO, "val2017", results_dir=str(folder / "results"), **options)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory):
    """Folder and scores of an uninterrupted evaluation."""
    folder = tmp_path_factory.mktemp("whole")
    run = make_run(folder)
    result = run.run(examples, shifted)
    run.report.write(run.scores)
    return folder, result


class Killed(Exception):
    pass


@pytest.mark.parametrize("interval", [0, 3600])
def test_a_killed_evaluation_goes_on(examples, whole, tmp_path, interval):
    rng, photos = np.random.default_rng(interval), []
    for attempt in range(20):
        left = int(rng.integers(1, 4))

        def watch(example, table):
            nonlocal left
            left -= 1
            if not left:
                raise Killed

        run = make_run(tmp_path, interval=interval if attempt < 3 else 0)
        photos.append(len(run.scores.photos))
        try:
            result = run.run(examples, shifted, watch=watch)
            break
        except Killed:
            continue
    assert photos == sorted(photos) and (photos[1] > 0) == (interval == 0) and len(photos) > 3
    run.report.write(run.scores)
    np.testing.assert_equal(result, whole[1])
    assert files(tmp_path) == files(whole[0])


def test_shards_add_up(examples, whole, tmp_path):
    def run_shard(i):
        run = make_run(tmp_path, (i, 3))
        run.run(examples, shifted)
        run.report.write(run.scores)

    for i in (2, 0):
        run_shard(i)
    with pytest.raises(InputError, match="1-of-3.state.json: missing; evaluate --shard=1/3 first"):
        merge(str(tmp_path / "results"), "val2017")
    run_shard(1)
    run_shard(1)  # nothing is left to do

    def make_report(kind, spec):
        return Report(kind, str(tmp_path / "report"), "val2017", spec, count=2)

    run = merge(str(tmp_path / "results"), "val2017", make_report)
    run.report.write(run.scores)
    np.testing.assert_equal(run.scores.result(), whole[1])
    state = "results/.val2017.0-of-1.state.json"  # its sums are in the order of the shards
    ours, theirs = files(tmp_path), files(whole[0])
    assert ours.pop(state) and theirs.pop(state) and ours == theirs
    again = merge(str(tmp_path / "results"), "val2017")
    np.testing.assert_equal(again.scores.result(), whole[1])


def test_states_and_results_of_others_are_left_alone(examples, whole, tmp_path):
    again = make_run(pathlib.Path(whole[0]))
    np.testing.assert_equal(again.run(None, None), whole[1])  # from the state; no photo is read
    shutil.copytree(whole[0] / "results", tmp_path / "unclosed" / "results")
    (tmp_path / "unclosed" / "results" / "panoptic_val2017.json").unlink()  # killed between the state and the JSON
    make_run(tmp_path / "unclosed").run(None, None)
    assert files(tmp_path / "unclosed" / "results") == files(whole[0] / "results")
    shutil.copytree(whole[0] / "results", tmp_path / "others" / "results")
    for state in (tmp_path / "others" / "results").glob(".*.json"):
        state.unlink()
    with pytest.raises(InputError, match="panoptic_val2017.json: exists; delete it or choose another"):
        make_run(tmp_path / "others")
    with pytest.raises(InputError, match="no shard of 'val2017'"):
        merge(str(tmp_path), "val2017")
    make_run(tmp_path, (0, 2), model="a").run(examples, shifted)
    with pytest.raises(InputError, match="of another evaluation, its model is 'a' and not 'b'"):
        make_run(tmp_path, (0, 2), model="b")
    (state,) = (tmp_path / "results").glob(".*.json")
    state.write_text(state.read_text()[:99])
    with pytest.raises(InputError, match="not JSON"):
        make_run(tmp_path, (0, 2), model="a")


def test_shards_are_not_those_of_an_earlier_evaluation(examples, tmp_path):
    make_run(tmp_path, model="a").run(examples, shifted)
    earlier, words = tmp_path / "results" / ".val2017.0-of-1.state.json", "0-of-1.state.json: of another evaluation"
    with pytest.raises(InputError, match=f"{words}, its model is 'a' and not 'b'; delete it"):
        make_run(tmp_path, (0, 2), model="b")
    earlier.rename(tmp_path / "earlier")
    (tmp_path / "results" / "panoptic_val2017.json").unlink()
    for i in range(2):
        make_run(tmp_path, (i, 2), model="b").run(examples, shifted)
    (tmp_path / "earlier").rename(earlier)
    with pytest.raises(InputError, match=f"{words}, its model is 'a' and not 'b'"):
        merge(str(tmp_path / "results"), "val2017")
    earlier.unlink()
    assert merge(str(tmp_path / "results"), "val2017").identity == {"model": "b"}


def test_a_report_of_shards_needs_the_pictures_of_each(examples, tmp_path):
    for i, report in enumerate((True, False)):
        run = make_run(tmp_path, (i, 2))
        run.report = run.report if report else None
        run.run(examples, shifted)

    def make_report(kind, spec):
        return Report(kind, str(tmp_path / "report"), "val2017", spec, count=2)

    with pytest.raises(InputError, match=r"report/val2017/00000\d.photo.jpg: no such picture; run each shard again"):
        merge(str(tmp_path / "results"), "val2017", make_report)
    run = make_run(tmp_path, (1, 2))
    assert run.complete
    for number, (example, seen) in enumerate(zip(examples((1, 2), 0), run.stored()), 1):
        run.report.add(example, seen, run.scores.photos[:number])
    run = merge(str(tmp_path / "results"), "val2017", make_report)
    assert pathlib.Path(run.report.write(run.scores)).exists()
