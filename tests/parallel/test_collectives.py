"""Reading a program's collectives: every spelling of groups and loops that XLA's compilers for CPU and TPU write."""

import types

import pytest

from lm.parallel.collectives import Kind, collectives

# Device ids run along tensor first, then fsdp, then data.
MESH = types.SimpleNamespace(axis_names=("data", "fsdp", "tensor"), shape={"data": 2, "fsdp": 2, "tensor": 2}, size=8)


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
"""


def program(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step\n\n{ADD}\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def one(line: str, before: str = ""):
    (found,) = collectives(program(line, before=before), MESH)
    return found


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("{{0,6},{1,7},{2,4},{3,5}}", ("data", "fsdp")),
        ("{}", ("data", "fsdp", "tensor")),
        ("[2,4]<=[8]", ("fsdp", "tensor")),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("[8,1]<=[8]", ()),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("fsdp",)),
        ("mesh['a'=2,'b'=1,'c'=4] {'c'}", ("fsdp", "tensor")),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ("fsdp",)),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ("data", "tensor")),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("fsdp", "tensor")),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
    ],
)
def test_groups_in_every_spelling_name_the_mesh_axes_they_extend_over(groups, axes):
    line = f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert one(line).axes == axes


@pytest.mark.parametrize(
    ("result", "bytes_", "kind"),
    [
        ("f32[8,16]{1,0:T(8,128)S(1)} all-gather(%p)", 512, Kind.ALL_GATHER),
        ("bf16[8]{0} reduce-scatter(%p)", 2 * 8 * 4, Kind.REDUCE_SCATTER),
        ("f32[] all-reduce(%p)", 4, Kind.ALL_REDUCE),
        ("(f32[2,3]{1,0}, pred[5]{0}, /*index=2*/s32[4]{0}) all-reduce(%p, %q, %r)", 24 + 5 + 16, Kind.ALL_REDUCE),
        ("f32[4]{0:T(128)} all-reduce-start(%p)", 16, Kind.ALL_REDUCE),
        ("(f32[4]{0}, f32[2]{0}) all-reduce-start(%p, %q)", 24, Kind.ALL_REDUCE),
        ("(f32[2]{0}, f32[8]{0}) all-gather-start(%p)", 32, Kind.ALL_GATHER),
        ("((f32[2]{0}, s8[1]{0}), (f32[8]{0}, s8[4]{0})) all-gather-start(%p, %q)", 36, Kind.ALL_GATHER),
        ("(f8e4m3fn[4]{0}, f8e4m3fn[4]{0}) all-to-all(%p, %q)", 8, Kind.ALL_TO_ALL),
    ],
)
def test_bytes_are_of_the_whole_array_that_a_group_works_on(result, bytes_, kind):
    found = one(f"%r = {result}, channel_id=3, replica_groups=[2,4]<=[8], dimensions={{0}}")
    assert (found.bytes, found.kind) == (bytes_, kind)


def test_a_permute_crosses_the_axes_between_its_pairs():
    pairs = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
    line = "%r = (f32[6]{0}, f32[6]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1, "
    found = one(line + pairs)
    assert (found.kind, found.bytes, found.axes) == (Kind.COLLECTIVE_PERMUTE, 24, ("fsdp",))


REDUCE = "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add"
LOOP = "%w = (s32[], f32[8]{0}) while(%t), condition=%test, body=%outer"
BODIES = f"""%inner (p: f32[8]) -> f32[8] {{
  {REDUCE}
}}

%outer (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %v = (s32[], f32[8]{{0}}) while(%t), condition=%other, body=%inner, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
TEST = """
%test (t: (s32[], f32[8])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}
"""


@pytest.mark.parametrize("counter", ["s32", "u32"])
def test_loops_multiply_by_the_stated_count_or_the_bound_they_are_compared_with(counter):
    assert one(LOOP, before=BODIES + TEST.replace("s32[]{:T(128)}", f"{counter}[]{{:T(128)}}")).count == 3 * 5


def test_a_loop_of_unknown_length_around_a_collective_is_refused():
    unknown = TEST.replace("constant(5)", "get-tuple-element(%t), index=1")
    with pytest.raises(ValueError, match="how often this loop runs is not stated: %w = "):
        one(LOOP, before=BODIES + unknown)


def test_a_loop_of_unknown_length_without_one_does_not_matter():
    text = program(LOOP, before=BODIES.replace(REDUCE, "%r = f32[8]{0} negate(%p)") + TEST.replace("LT", "NE"))
    assert collectives(text, MESH) == []


def test_the_pieces_of_an_overlapped_collective_are_one():
    piece = "%g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"
    start = f"%start (p: f32[1]) -> f32[8] {{\n  {piece}\n}}\n\n"
    bodies = BODIES.replace(REDUCE, piece) + TEST + start
    text = program("%f = f32[8]{0} fusion(%p), kind=kCustom, calls=%start", LOOP, before=bodies)
    assert [found.count for found in collectives(text, MESH)] == [1]


def test_a_fused_sum_and_slice_is_a_reduce_scatter_and_says_what_for():
    reduce = f'{REDUCE}, metadata={{op_name="jit(step)/dot_general" stack_frame_id=7}}'
    before = f"%all-reduce-scatter.2 (p: f32[8]) -> f32[1] {{\n  {reduce}\n}}\n"
    found = one("%f = f32[1]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2", before=before)
    assert (found.kind, found.bytes, found.source) == (Kind.REDUCE_SCATTER, 32, "jit(step)/dot_general")
    assert found.shape == "f32[8]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("module @jit_step {}", "no ENTRY computation"),
        (program(REDUCE.replace("[1,8]<=[8]", "[1,16]<=[16]")), "more devices than the mesh's 8"),
        (program(REDUCE.replace("[1,8]<=[8]", "new['x']")), "no groups of devices could be read from"),
    ],
)
def test_what_is_not_understood_is_never_passed_over(text, told):
    with pytest.raises(ValueError, match=told):
        collectives(text, MESH)
