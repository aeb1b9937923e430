"""Costs and all-reduces that hlo.py reads from an optimised program."""

from jaxlib import _hlo

import hlo
from hlo import Cost

# A loop with three iterations of a matrix product, a loop of unknown length, a convolution in a fusion, a copy whose op
# name is missing, and a fusion that slices its operand.
PROGRAM = """HloModule step

%body.1 (p: (s32[], f32[8,32], f32[32,65])) -> (s32[], f32[8,32], f32[32,65]) {
  %p = (s32[]{:T(128)}, f32[8,32]{1,0:T(8,128)}, f32[32,65]{1,0:T(8,128)S(1)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  %a = f32[8,32]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %b = f32[32,65]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=2
  %dot.1 = f32[8,65]{1,0:T(8,128)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="m/backbone/stage3_block2/attention/width/MatMul"}, backend_config={"estimated_cycles":"100"}
  ROOT %t1 = (s32[]{:T(128)}, f32[8,32]{1,0:T(8,128)}, f32[32,65]{1,0:T(8,128)S(1)}) tuple(%n, %a, %b)
}

%three (c: (s32[], f32[8,32], f32[32,65])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8,32]{1,0:T(8,128)}, f32[32,65]{1,0:T(8,128)S(1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(3)
  %more = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
  %less.1 = pred[]{:T(512)} compare(%i, %more), direction=LT
  ROOT %and = pred[]{:T(512)} and(%less, %less.1)
}

%body.2 (q: (s32[], s32[])) -> (s32[], s32[]) {
  %q = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %m = s32[]{:T(128)} get-tuple-element(%q), index=1
  %add.1 = s32[]{:T(128)} add(%j, %m), metadata={op_name="optimizer/add"}, backend_config={"estimated_cycles":"11"}
  ROOT %t2 = (s32[]{:T(128)}, s32[]{:T(128)}) tuple(%add.1, %m)
}

%unknown (u: (s32[], s32[])) -> pred[] {
  %u = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%u), index=0
  %n.1 = s32[]{:T(128)} get-tuple-element(%u), index=1
  ROOT %less.2 = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT
}

%fused.1 (p0: bf16[1,9,9,16], p1: bf16[3,3,16,32]) -> bf16[1,5,5,32] {
  %p0 = bf16[1,9,9,16]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[3,3,16,32]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %conv = bf16[1,5,5,32]{3,2,1,0:T(8,128)(2,1)} convolution(%p0, %p1), window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, metadata={op_name="m/semantic_head/conv/Conv2D"}
}

%fused.2 (q0: f32[100,128]) -> f32[1,128] {
  %q0 = f32[100,128]{1,0:T(8,128)} parameter(0)
  ROOT %cut = f32[1,128]{1,0:T(1,128)} slice(%q0), slice={[0:1], [0:128]}
}

ENTRY %main.2 (x: bf16[1,9,9,16], k: bf16[3,3,16,32], t: f32[100,128], v: (s32[], f32[8,32], f32[32,65]), w: (s32[], s32[])) -> f32[1,128] {
  %x = bf16[1,9,9,16]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[3,3,16,32]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %t = f32[100,128]{1,0:T(8,128)} parameter(2)
  %v = (s32[]{:T(128)}, f32[8,32]{1,0:T(8,128)}, f32[32,65]{1,0:T(8,128)S(1)}) parameter(3)
  %w = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(4)
  %while.1 = (s32[]{:T(128)}, f32[8,32]{1,0:T(8,128)}, f32[32,65]{1,0:T(8,128)S(1)}) while(%v), condition=%three, body=%body.1
  %while.2 = (s32[]{:T(128)}, s32[]{:T(128)}) while(%w), condition=%unknown, body=%body.2
  %fusion.1 = bf16[1,5,5,32]{3,2,1,0:T(8,128)(2,1)} fusion(%x, %k), kind=kOutput, calls=%fused.1, backend_config={"estimated_cycles":"50"}
  %copy.1 = bf16[1,5,5,32]{2,1,3,0:T(8,128)(2,1)} copy(%fusion.1), backend_config={"estimated_cycles":"7"}
  ROOT %fusion.2 = f32[1,128]{1,0:T(1,128)} fusion(%t), kind=kLoop, calls=%fused.2, metadata={op_name="center_loss/strided_slice"}, backend_config={"estimated_cycles":"3"}
}
"""  # noqa: E501


def parse(text):
    """Parses a program's text to an `HloModuleProto`."""
    return hlo.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def test_parts_of_parts():
    assert hlo.part_of_op("semantic_loss/hardest_pixels/mul") == "semantic_loss hardest_pixels"
    assert hlo.part_of_op("m/instance_decoder/resize/einsum") == "instance_decoder resize"
    assert hlo.part_of_op("m/stage2_block1/attention/width/MatMul") == "stage2 attention"


def test_costs_count_loops_and_name_parts():
    by_op, by_part = hlo.costs(parse(PROGRAM))
    assert {name: cost.cycles for name, cost in by_op.items()} == {"dot": 300, "fusion": 53, "copy": 7, "add": 11}
    # %b lies in the core's own memory. The tile of f32[8,32] has 8 x 128 elements.
    assert by_part["stage3 attention"] == Cost(300, 3 * (8 * 128 + 8 * 128) * 4, 3 * 8 * 32 * 65)
    # The fusion has the part of its inner op. The copy inherits the part of its operand.
    image, kernel, result = 9 * 16 * 128 * 2, 9 * 16 * 128 * 2, 5 * 8 * 128 * 2
    pairs = sum(0 <= 2 * out + offset - 1 < 9 for out in range(5) for offset in range(3))
    copied = 32 * 8 * 128 * 2
    assert by_part["semantic_head"] == Cost(57, image + kernel + 2 * result + copied, pairs**2 * 16 * 32)
    assert by_part["center_loss"] == Cost(3, 2 * 128 * 4)  # it reads one row of the table, and writes one row
    assert by_part["optimizer"].cycles == 11
    assert list(by_part) == ["stage3 attention", "semantic_head", "optimizer", "center_loss"]
    assert hlo.costs(parse(PROGRAM), side=128)[1]["stage3 attention"].products == 3 * 8 * 128 * 128


def test_a_part_moves_what_it_shares_with_others():
    shared = hlo.shared_bytes(parse(PROGRAM), hlo.layer_of_op)
    assert shared["semantic_head"] == 2 * (9 * 9 * 16 + 3 * 3 * 16 * 32) and shared["center_loss"] == 2 * 128 * 4
    assert hlo.layer_of_op("m/stage2_block1/attention/width/MatMul") == "stage2 attention block1 width"


def test_a_kernels_cycles_come_from_its_schedule():
    text = """HloModule step
ENTRY %main (x: f32[8]) -> bf16[8,128] {
  %x = f32[8]{0} parameter(0)
  ROOT %attend.1 = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(), custom_call_target="tpu_custom_call", metadata={op_name="m/stage2_block1/attention/width/attend"}
}
"""  # noqa: E501
    by_op, by_part = hlo.costs(parse(text), {"attend.1": 60})
    assert by_op == {"kernel": Cost(60, 8 * 128 * 2)} and by_part == {"stage2 attention": Cost(60, 8 * 128 * 2)}
    said = text.replace(", metadata", ', backend_config={"cost_estimate":{"bytes_accessed":"77"}}, metadata')
    assert hlo.costs(parse(said), {"attend.1": 60})[0] == {"kernel": Cost(60, 77)}


ADD = """HloModule step
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""


def test_all_reduces_over_replicas_have_the_bytes_of_their_results():
    """Replicas have two devices: 0 and 1, and 2 and 3. All-reduces within a replica do not count."""
    devices = ", channel_id={0}, use_global_device_ids=true"
    inside = ["{{0,1},{2,3}}", "[2,2]<=[4]"]
    across = ["{{0,1,2,3}}", "[1,4]<=[4]", "{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", "{}"]
    kinds = [group + devices.format(1 + i) for i, group in enumerate(inside + across)]
    kinds.append("{{0,1}}")  # without global ids, the numbers are replicas
    lines = [f"  %x.{i} = f32[{1 + i}]{{0}} parameter({i})\n" for i in range(len(kinds))] + [
        f"  %s.{i} = f32[{1 + i}]{{0}} all-reduce(%x.{i}), replica_groups={kind}, to_apply=%add\n"
        for i, kind in enumerate(kinds)
    ]
    both = "(f32[1]{0:T(256)}, f32[2]{0})"
    lines.append(f"  ROOT %t = {both} all-reduce(%x.0, %x.1), replica_groups={{}}, to_apply=%add\n")
    parameters = ", ".join(f"x.{i}: f32[{1 + i}]" for i in range(len(kinds)))
    program = parse(f"{ADD}ENTRY %main ({parameters}) -> (f32[1], f32[2]) {{\n{''.join(lines)}}}\n")
    assert hlo.all_reduces(program, partitions=2) == [12, 16, 20, 24, 28, 32, 12]
    assert hlo.all_reduces(program) == [4, 8, 12, 16, 20, 24, 28, 32, 12]
