"""Results of the commands that measure speed."""

import pathlib

import pytest

from axial.analysis.input_speed import demand, demand_lines
from axial.analysis.parts import REST, part_of
from tests.conftest import make_task


def test_parts_are_named():
    for name, part in {
        "axial_deeplab/backbone/stage2_block1/attention/height/kernel:0": "stage2",
        "classifier/backbone/stem/conv/kernel:0": "stem",
        "panoptic_deeplab/backbone/middle12/conv1/depthwise/conv/depthwise_kernel:0": "middle",
        "jit(f)/gradient_tape/panoptic_deeplab/semantic_decoder/fuse_res2/pointwise/conv/Conv2D": "semantic_decoder",
        "panoptic_deeplab/semantic_head/logits/conv/bias:0": "semantic_head",
        "axial_deeplab/decoder_res3/reduce/conv/kernel:0": "decoder_res3",
        "classifier/logits/conv/kernel:0": "logits",
        "optimizer/RAdamLookahead/add": "optimizer",
        "gradient_tape/semantic_loss/hardest_pixels/mul": "semantic_loss",
        "AddN": REST,
    }.items():
        assert part_of(name) == part


def test_how_many_hosts_feed_a_slice(sample_dir):
    """A step of 64 images takes 0.5 s: 128 images/s. A host prepares 12 images/s on 4 cores, so 24 images/s on 8."""
    task = make_task(sample_dir)
    slice_ = {"batch": 64, "step_seconds": 0.5, "cores": 8}
    demanded = demand(task, 12.0, **slice_, local_cores=4)
    assert demanded["images_per_second"] == 128 and demanded["images_per_core_second"] == 3
    assert demanded["images_per_host_second"] == 24 and demanded["hosts"] == 6
    stored = sum(path.stat().st_size for path in pathlib.Path(sample_dir).glob("train2017-*.tfrecord"))
    assert demanded["shard_bytes_per_second"] == pytest.approx(128 * stored / 8)
    (batch,) = task.train_dataset(2, seed=0).take(1)
    prepared = sum(x.numpy().nbytes for x in batch.values()) / 2
    assert demanded["batch_bytes_per_second"] == pytest.approx(128 * prepared)
    lines = list(demand_lines(demanded, **slice_))
    assert lines[0].startswith("a step of 64 images in 0.5 s needs 128.0 images/s") and "needs 6 of them" in lines[2]
