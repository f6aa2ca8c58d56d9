"""The largest arrays of a plan have the names of leaves, or the lines that make them."""

import pytest
from small_plans import small

from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.named_tensors import name_tensors
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology

TEXT = """HloModule m

FileNames
1 "/home/me/models/block.py"

FunctionNames
1 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=44 end_line=44 column=2 end_column=2}

StackFrames
3 {file_location_id=1 parent_frame_id=3}

%body (p: (f32[8], f32[4,8])) -> (f32[8], f32[4,8]) {
  %p = (f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%p), index=0
  %b = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %u = f32[4,8]{1,0} add(%b, %b), MADE{op_name="jit(s)/jvp(f)/mlp/mul" stack_frame_id=3}
  ROOT %t = (f32[8]{0}, f32[4,8]{1,0}) tuple(%a, %u)
}

%condition (p.1: (f32[8], f32[4,8])) -> pred[] {
  %p.1 = (f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[8], m: f32[8], y: s32[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'blocks\\'][0][\\'up\\']"}
  %m = f32[8]{0} parameter(1), metadata={op_name="state.opt_state[1][0].mu[\\'up\\']"}
  %y = s32[4]{0} parameter(2), metadata={op_name="batch[\\'tokens\\']"}
  %z = f32[4,8]{1,0} broadcast(%x)
  %v = (f32[8]{0}, f32[4,8]{1,0}) tuple(%x, %z)
  %w = (f32[8]{0}, f32[4,8]{1,0}) while(%v), condition=%condition, body=%body
  %g = f32[8]{0} negate(%x), MADE{op_name="jit(s)/transpose(jvp(f))/head/dot" stack_frame_id=9}
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=0
}
""".replace("MADE", "metadata=")


def test_leaves_and_the_lines_that_make_arrays_are_named():
    buffers = (("w", "1", 128), ("x", "", 32), ("m", "", 32), ("g", "", 32), ("y", "", 16))
    found = name_tensors(HloProgram(TEXT), TEXT, (*buffers, ("gone", "", 8)))
    assert [(each.role, each.name, each.source) for each in found] == [
        ("forward", "mlp/mul", "models/block.py:44"),
        ("parameter", "params/blocks/0/up", ""),
        ("optimizer state", "opt_state/1/0/mu/up", ""),
        ("backward", "head/dot", ""),
        ("batch", "batch/tokens", ""),
    ]
    assert found[0].shape == "f32[4,8]"


def test_arrays_alike_are_one_row():
    (row,) = name_tensors(HloProgram(TEXT), TEXT, (("g", "", 32), ("g", "", 32)))
    assert (row.bytes, row.arrays) == (64, 2)


def test_the_largest_leaves_of_a_plan_are_in_it():
    plan = make_plan(small(), find_topology("cpu:8"))
    sizes = [each.bytes for each in plan.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= plan.peak
    by_role = {each.role: each for each in plan.tensors}
    assert by_role["parameter"].name.startswith("params/")
    assert by_role["optimizer state"].name.startswith("opt_state/")
    made = [each for each in plan.tensors if each.role in ("forward", "backward")]
    assert all(".py:" in each.source for each in made)
    assert made


@pytest.mark.compiler
def test_a_step_of_a_tpu_names_its_leaves():
    plan = make_plan(small("parallel.kind=fsdp"), find_topology("v5e:2x2"))
    assert any(each.name.startswith("params/") for each in plan.tensors)
    assert not plan.unread
