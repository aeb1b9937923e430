"""tpu_compile: its separate process, its parsers of the TPU compiler's texts, and its search for the largest batch."""

import os
import signal

import pytest
from jaxlib import _hlo

import schedules
import tpu_compile
from axial.errors import InputError


def killed_between():
    """Kills its process when half of the result is sent, as if the process ran out of memory."""
    from multiprocessing.connection import Connection

    whole = Connection._send

    def half(self, buffer, *rest):
        whole(self, buffer[: len(buffer) // 2], *rest)
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = half
    return bytes(2**20)


def test_a_killed_process_is_a_lack_of_memory():
    with pytest.raises(MemoryError, match="was killed"):
        tpu_compile.alone(killed_between)


# A grid of 6 programs with two loops: 4 iterations of 2 bundles, and 3 iterations of 2 bundles and an inner loop, which
# has 5 iterations of 2 bundles.
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
    assert schedules.count(BUNDLES)["bundles"] == 2 + 6 * (5 + 2 * 4 + 3 * (2 + 2 * 5))
    # If the chip computes the first loop's number of iterations, the loop counts once.
    computed = schedules.count(BUNDLES.replace("%s3_s1, 4", "%s3_s1, %s9_s2"))
    assert computed["bundles"] == 2 + 6 * (5 + 2 + 3 * (2 + 2 * 5))
    assert schedules.count("     0   :  { %s1_s0 = smov 0 }\n   0x1   :  {}\n")["bundles"] == 2
    with pytest.raises(InputError, match="a loop whose turns are not named: %p4_p0"):
        schedules.count(BUNDLES.replace("%p4_p0 = scmp.ge", "%p4_p0 = scmp.eq"))


def test_the_busiest_unit_is_a_kernels_bound():
    """A loop of 4 iterations has 2 products, a rotation, a spill, and operations on a mask and a vector."""
    more = "  ;;  %v1 = vpop.permute.xlu1  ;;  %5 = vrot.lane.b32.xlu0 %v2, 3  ;;  %vm1 = vmand %vm2, %vm3  ;;  "
    more += "%6 = vmatmul.bf16.gmra.mxu0 %v3  ;;  %7 = vmatmul.bf16.gmra.mxu1 %v3  ;;  %v4 = vmul.f32 %v1, %v1  ;;  "
    text = BUNDLES.replace("%s4_s0 = smov 0", f"{more}vst [vmem:[#allocation7_spill] sm:$0xff] /*vst_source=*/%v1")
    kinds = {"matrix": 8, "shuffle": 4, "results": 4, "store": 4, "vector": 4, "spills": 4}
    assert schedules.count(text) == {"bundles": 296, **{kind: 6 * number for kind, number in kinds.items()}}
    busy = schedules.busy(schedules.count(text), "v5e")
    assert list(busy.items())[:2] == [("matrix", 6 * 8 * 4), ("shuffle", 6 * 4 * 8 / 3)]


@pytest.mark.parametrize("largest", [0, 1, 2, 13, 4096])
def test_the_largest_batch_takes_few_compilations(largest):
    asked = []
    assert tpu_compile.largest_batch(lambda batch: asked.append(batch) or batch <= largest) == largest
    assert len(set(asked)) == len(asked) <= 15 and max(asked) <= max(2 * largest, 1)


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


@pytest.mark.parametrize("used,fits", [(15.75, True), (15.76, False)])
def test_a_program_that_needs_more_than_a_device_has_does_not_fit(used, fits, monkeypatch):
    """The compiler itself accepts a program that needs slightly more than the device's memory."""
    text = "HloModule step\nENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"
    program = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    monkeypatch.setattr(tpu_compile, "alone", lambda *arguments: (int(used * 2**30), None, program, {}))
    compiled = tpu_compile.compile_for(program, "v5e:1x1")
    assert (compiled.fits, compiled.limit) == (fits, int(15.75 * 2**30))
