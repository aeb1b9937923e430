"""Metrics and tables of segmentation. Predictions have the original size of the photo."""

import numpy as np
import pytest

from axial.data.specs import COCO
from axial.tasks.metrics import evaluate
from axial.tasks.segmentation.evaluator import PANOPTIC, PanopticMetrics, segment_table
from tests.truths import perfect, shifted, truth_as_prediction


@pytest.fixture(scope="module")
def examples(sample_dir):
    return list(PANOPTIC.examples(sample_dir, "val2017", COCO))


def test_truth_scores_one(examples):
    scores = evaluate(examples, perfect, PanopticMetrics(COCO))
    assert scores["pq"]["all"]["pq"] == 1.0 and scores["miou"]["miou"] == 1.0
    assert scores["ap"]["ap"] > 0.999


def test_thresholds_add_matching_accuracy_and_change_nothing_else(examples):
    """No IoU is exactly 1/2 here, so the counts at the threshold 1/2 equal the counts of PQ."""
    plain = evaluate(examples, shifted, PanopticMetrics(COCO))
    scores = evaluate(examples, shifted, PanopticMetrics(COCO, thresholds=(0.5, 0.9)))
    matching = scores.pop("matching")
    np.testing.assert_equal(scores, plain)
    things = {name: row for name, row in plain["pq"]["per_class"].items() if COCO.things[COCO.class_names.index(name)]}
    for name, row in things.items():
        matches = matching["0.5"]["per_class"][name]
        assert [matches[k] for k in ("tp", "fp", "fn")] == [row[k] for k in ("tp", "fp", "fn")]
    counts = {k: sum(row[k] for row in things.values()) for k in ("tp", "fp", "fn")}
    assert min(counts.values()) > 0
    assert matching["0.5"]["accuracy"] == counts["tp"] / sum(counts.values()) > matching["0.9"]["accuracy"]
    result = {**scores, "matching": matching}
    for flat in (PANOPTIC.headline, PANOPTIC.columns):
        added = {"accuracy@0.5": matching["0.5"]["accuracy"], "accuracy@0.9": matching["0.9"]["accuracy"]}
        np.testing.assert_equal(flat(result), {**flat(plain), **added})
    percents = [f"{100 * matching[at]['accuracy']:.1f}" for at in matching]
    (line,) = set(PANOPTIC.lines(result)) - set(PANOPTIC.lines(plain))
    assert line == "things matched by IoU, TP/(TP+FP+FN): accuracy@0.5={} accuracy@0.9={}".format(*percents)
    header, rows, last = PANOPTIC.classes(result)
    assert header[-2:] == ["accuracy@0.5", "accuracy@0.9"] and {len(row) for row in [*rows, *last]} == {len(header)}
    accuracies = {row[0].split(" (")[0]: row[-2:] for row in last}
    assert accuracies == {"things": percents, "stuff": ["", ""], "all": ["", ""]}


def test_photos_whose_objects_are_left_out_are_counted(examples):
    """Merged shards add up the number of photos with dropped objects. The report has no line for a number of 0."""
    shards = [PanopticMetrics(COCO) for _ in range(2)]
    for i, example in enumerate(examples):
        shards[i % 2].update(example, {**truth_as_prediction(example), "dropped": np.int32(i % 4)})
    whole = PanopticMetrics(COCO)
    for shard in shards:
        again = PanopticMetrics(COCO)
        again.restore(shard.state())
        whole.merge(again)
    result, plain = whole.result(), evaluate(examples, perfect, PanopticMetrics(COCO))
    assert result["full_photos"] == sum(i % 4 > 0 for i in range(len(examples)))
    (line,) = set(PANOPTIC.lines(result)) - set(PANOPTIC.lines(plain))
    assert line.startswith(f"{result['full_photos']} photos with as many objects as") and "top_k = None" in line


def test_scores_of_segments_come_from_their_centres(examples):
    """A thing's score is the score of its instance. A stuff segment's score is 1."""
    for example in examples:
        prediction = truth_as_prediction(example)
        segments, classes, scores, _ = segment_table(prediction, COCO)
        assert segments.shape == tuple(example["size"].numpy())
        for i, category in enumerate(classes):
            owners = np.unique(prediction["instance"][segments == i + 1])
            assert len(owners) == 1
            expected = prediction["score"][owners[0] - 1] if COCO.things[category] else 1.0
            assert scores[i] == expected
