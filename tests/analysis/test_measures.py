"""What the measuring commands compute from their inputs."""

import os
import pathlib

import numpy as np
import pytest

from axial import chips
from axial.analysis.input_speed import demand, demand_lines, measure
from axial.analysis.parts import REST, part_of
from axial.errors import InputError
from axial.tpu_compiler import compile as tpu_compile
from conftest import make_task

# A grid of 6 with two loops: one of 4 turns and 2 bundles; one of 3 turns, in which a loop of 5 turns has 2 bundles.
BUNDLES = """
= control target key start
LB: loop body

     0   :  { %s1_s0 = smov 0 }
   0x1 LB: > { %s2_s0 = smov 0 } /* Start region 9 :: Start region 1 */
   0x2   :  {} /* End region 2 */
   0x3 LB: >> { %p1_p0 = scmp.ge.s32.totalorder %s3_s1, 4 /* loop exit test */ } /* Start region 3 */
   0x4   : > { %4 = sbr.rel (!%p1_p0) target = $region3  ;;  %s4_s0 = smov 0 }
   0x5   : > { %5 = sbr.rel (!%p5_p1) target = $region8 } /* End region 3 */
0x6 LB: >> { %s5_s0 = smov 0 } /* Start region 5 */
0x7 LB: >>> { %p2_p0 = scmp.ge.s32.totalorder %s6_s0, 5 } /* Start region 6 */
   0x8   : >>> { %p3_p1 = scmp.ge.s32.totalorder (%p2_p0), %s7_s0, 3  ;;  %6 = sbr.rel (!%p2_p0) target = $region6 }
   0x9   : >> { %7 = sbr.rel (!%p3_p1) target = $region5 }
   0xa   : > { %p4_p0 = scmp.ge.s32.totalorder %s8_s0, 6 /* loop exit test */ } /* Start region 8 */
   0xb   : > { %8 = sbr.rel (!%p4_p0) target = $region9 }
   0xc   :  { %1 = vsyncpa [#allocation6], 1 }
"""


def test_bundles_of_a_loop_run_at_each_turn():
    assert tpu_compile.bundles_run(BUNDLES) == 2 + 6 * (5 + 2 * 4 + 3 * (2 + 2 * 5))
    # The chip computes how often the first loop turns.
    assert tpu_compile.bundles_run(BUNDLES.replace("%s3_s1, 4", "%s3_s1, %s9_s2")) == 2 + 6 * (5 + 2 + 3 * (2 + 2 * 5))
    assert tpu_compile.bundles_run("     0   :  { %s1_s0 = smov 0 }\n   0x1   :  {}\n") == 2
    with pytest.raises(InputError, match="a loop whose turns are not named: %p4_p0"):
        tpu_compile.bundles_run(BUNDLES.replace("%p4_p0 = scmp.ge", "%p4_p0 = scmp.eq"))


def test_kernels_of_one_body_have_one_file(tmp_path):
    """There are two calls of one kernel, which share a file, and one call of another kernel."""
    call = (
        '  %attend.{0} = (bf16[8,65]) custom-call(%q), custom_call_target="tpu_custom_call", '
        'metadata={{op_name="m/stage2_block1/attention/width/attend/pallas_call"}}, '
        'backend_config={{"custom_call_config":{{"body":"{1}"}}}}'
    )
    text = "\n".join([call.format(1, "AB"), call.format(2, "AB"), call.format(3, "CD")])
    for name, schedule in (("attend.1", BUNDLES), ("attend.3", "   0x1   :  {}\n"), ("fusion.1", BUNDLES)):
        (tmp_path / f"123-{name}-71-{tpu_compile.SCHEDULE}.txt").write_text(schedule)
        (tmp_path / f"123-{name}-70-schedule-analysis_{tpu_compile.SCHEDULE}.txt").write_text("Schedule analysis:\n")
    assert tpu_compile._kernel_cycles(text, tmp_path) == {"attend.1": 296, "attend.2": 296, "attend.3": 1}
    with pytest.raises(InputError, match="no schedule, so no cycles, of the kernel m/stage2_block1/.*attend"):
        tpu_compile._kernel_cycles(call.format(9, "EF"), tmp_path)


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
    assert part_of("semantic_loss/hardest_pixels/mul", sub=True) == "semantic_loss hardest_pixels"
    assert part_of("m/instance_decoder/resize/einsum", sub=True) == "instance_decoder resize"
    assert part_of("m/stage2_block1/attention/width/MatMul", sub=True) == "stage2 attention"


@pytest.mark.parametrize("largest", [0, 1, 2, 13, 4096])
@pytest.mark.parametrize("memory", ["linear", "in steps", "flat near the limit", "not known"])
def test_the_largest_batch_takes_few_compilations(largest, memory):
    asked = []
    of = {
        "linear": lambda batch: 300 + 40 * batch,
        "in steps": lambda batch: 300 + 40 * (batch + batch % 16),
        "flat near the limit": lambda batch: min(300 + 40 * batch, 290 + 36 * largest + batch // 4),
    }
    used = of.get(memory, lambda batch: 0)
    limits = {"in steps": (used(largest) + used(largest + 1)) // 2, "not known": None}

    def compiled(batch):
        asked.append(batch)
        return tpu_compile.Compiled(batch <= largest, used(batch), None)

    def found(known=None):
        asked.clear()
        batch = tpu_compile.largest_batch(compiled, limits.get(memory, 320 + 40 * largest), known)
        assert batch == largest
        assert len(set(asked)) == len(asked)
        return len(asked)

    assert found() <= (8 if memory == "linear" else 15)
    assert max(asked) <= max(8 * largest, 1)
    known = {batch: used(batch) + 5 for batch in (1, largest)}  # much the same program, on another slice
    assert found(known) <= (5 if memory == "linear" else 15)


@pytest.mark.parametrize(
    "name,words", [("v5e", "shape"), ("v5e:4xx", "shape"), ("5e:2x2", "no TPU"), ("v5f:2x2", "no TPU")]
)
def test_a_wrong_slice_is_named(name, words):
    with pytest.raises(InputError, match=words):
        chips.replicas_of(name)


def test_devices_of_a_slice():
    assert chips.replicas_of("v5e:4x4") == 16
    assert chips.replicas_of("v4:2x2x2") == 8
    assert chips.replicas_of("v3:2x2", partitions=4) == 2
    with pytest.raises(InputError, match="TrainingConfig.partitions = 3: v5e:4x4 has 16 devices"):
        chips.replicas_of("v5e:4x4", 3)


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory. Used 27.21G of 15.75G hbm. Exceeded hbm capacity by 11.46G.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (27.21G) "
        "exceeds available HBM (15.75G).",
    ],
)
def test_a_refusal_says_how_much(words):
    used, limit = tpu_compile.refused_sizes(words)
    assert used / 2**30 == pytest.approx(27.21) and limit / 2**30 == pytest.approx(15.75)
    assert tpu_compile.refused_sizes("INTERNAL: something else") is None


def test_a_program_that_needs_more_than_a_device_has_does_not_fit():
    answer = {"used": 20, "text": "", "kernels": {}}
    assert tpu_compile._report(answer, set(), 10) == tpu_compile.Compiled(False, 20, 10)
    assert tpu_compile._report(answer, set(), 20).fits and tpu_compile._report(answer, set(), None).fits


def test_how_many_hosts_feed_a_slice(sample_dir, monkeypatch):
    """By hand: 64 images in half a second; 12 a second on 4 cores are 3 a core and 24 on a host of 8."""
    task = make_task(sample_dir)
    found = demand(task, 12.0, batch=64, step_seconds=0.5, cores=8, own_cores=4)
    assert found["images_per_second"] == 128 and found["images_per_core_second"] == 3
    assert found["images_per_host_second"] == 24 and found["hosts"] == 6
    stored = sum(path.stat().st_size for path in pathlib.Path(sample_dir).glob("train2017-*.tfrecord"))
    assert found["shard_bytes_per_second"] == pytest.approx(128 * stored / 8)
    (batch,) = task.train_dataset(2, seed=0).take(1)
    prepared = sum(x.numpy().nbytes for x in batch.values()) / 2
    assert found["batch_bytes_per_second"] == pytest.approx(128 * prepared)
    lines = list(demand_lines(found, batch=64, step_seconds=0.5, cores=8))
    assert lines[0].startswith("a step of 64 images in 0.5 s needs 128.0 images/s") and "needs 6 of them" in lines[2]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert demand(task, 12.0, batch=64, step_seconds=0.5, cores=8)["images_per_core_second"] == 12 / os.cpu_count()


@pytest.mark.slow  # trains a model for seconds
def test_input_speed(sample_dir):
    task = make_task(sample_dir)
    lines = []
    speeds = measure(task, quick=True, report=lines.append)
    assert all(np.isfinite(s) and s > 0 for s in speeds.values())
    assert lines == [f"{name}: measuring" for name in speeds if name != "pipeline / model"]
