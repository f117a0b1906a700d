"""What a compiled program sends between devices, read from its text.

XLA states each collective's shape and groups, but not which mesh axis that is, nor how often a loop runs it.
"""

import dataclasses
import enum
import functools
import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh


class Kind(enum.StrEnum):
    """The collective operations of XLA."""

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction, as each device takes part in it.

    `bytes` are of the whole array that a group works on in one execution: what an all-gather makes, what the others
    are given (a reduce-scatter's result times the size of its group). `axes` are the mesh axes that a group extends
    over, in the mesh's order. `count` is how often a run of the program executes it. `shape` is XLA's spelling of the
    result, and `source` says which operation it was made for (jax's name stack; empty where XLA states none).
    """

    kind: Kind
    bytes: int
    axes: tuple[str, ...]
    count: int
    shape: str
    source: str


_NAME = r"%[\w.\-]+"
_COMPUTATION = re.compile(rf"(ENTRY )?({_NAME}) \(.*\{{$")
_COLLECTIVE = re.compile(rf"\s+(?:ROOT )?{_NAME} = (\(.*?\)|\S+) ({'|'.join(Kind)})(-start)?\(")
_CALLED = re.compile(rf"\b(calls|to_apply|body|branch_computations)=\{{?({_NAME}(?:, {_NAME})*)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{(.*?)\}")
_MESH_AXIS = re.compile(r"'(\w+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


class _Found(NamedTuple):
    line: str
    match: re.Match
    computation: str
    times: int


def collectives(hlo_text: str, mesh: Mesh) -> list[Collective]:
    """The collectives of a compiled program for the devices of `mesh` (`compiled.as_text()`), in the text's order.

    A collective inside a loop counts as often as the loop runs: as XLA states it, or else the bound that a counted
    loop is compared with. Every branch of a conditional counts. The pieces that the TPU compiler cuts an overlapped
    collective into share a channel and are one.

    Raises:
      ValueError: the program is of another number of devices, a loop around a collective has no stated length, or the
        text is of a form not known here.
    """
    entry, computations = _computations(hlo_text)

    @functools.cache
    def inside(name: str) -> tuple[_Found, ...]:
        found = []
        for line in computations[name]:
            if match := _COLLECTIVE.match(line):
                found.append(_Found(line, match, name, 1))
            for attribute, names in _CALLED.findall(line):
                inner = [one for called in names.split(", ") for one in inside(called)]
                trips = _trip_count(line, computations) if attribute == "body" and inner else 1
                found += [one._replace(times=one.times * trips) for one in inner]
        return tuple(found)

    by_channel: dict[str, Collective] = {}
    for found in inside(entry):
        channel = re.search(r"channel_id=\d+", found.line)
        key = channel[0] if channel else found.match[0]
        collective = _read(found, mesh)
        # The piece that begins an overlapped collective is run once, those that carry it through a loop more often.
        if key not in by_channel or collective.count < by_channel[key].count:
            by_channel[key] = collective
    return list(by_channel.values())


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    entry, computations = "", dict[str, list[str]]()
    lines: list[str] = []
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            lines = computations[heading[2]] = []
            entry = heading[2] if heading[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is not that of a compiled program")
    return entry, computations


def _trip_count(loop: str, computations: dict[str, list[str]]) -> int:
    if stated := re.search(r"known_trip_count\D*(\d+)", loop):
        return int(stated[1])
    condition = re.search(rf"condition=({_NAME})", loop)
    body = "\n".join(computations[condition[1]]) if condition else ""
    bounds = re.findall(r" [su]\d+\[\]\S* constant\((\d+)\)", body)
    if len(bounds) != 1 or "direction=LT" not in body:
        raise ValueError(f"how often this loop runs is not stated: {loop.strip()[:200]}")
    return int(bounds[0])


def _read(found: _Found, mesh: Mesh) -> Collective:
    kind, arrays = Kind(found.match[2]), _ARRAY.findall(found.match[1])
    if found.match[3] and kind is not Kind.ALL_REDUCE:
        # What is begun is a tuple of operands, as many results and perhaps some counters of the runtime's own.
        arrays = [array for array in arrays if array != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    groups = _groups(found.line, mesh.size)
    size = sum(math.prod(map(int, filter(None, dims.split(",")))) * _bits(kind_) for kind_, dims in arrays) // 8
    if kind is Kind.REDUCE_SCATTER:
        size *= len(groups[0])
    if kind is Kind.ALL_REDUCE and found.computation.startswith("%all-reduce-scatter"):
        kind = Kind.REDUCE_SCATTER  # the TPU compiler's spelling: the sum, and a slice of it, in one fusion
    source = re.search(r'op_name="([^"]*)"', found.line)
    shape = ", ".join(f"{name}[{dims}]" for name, dims in arrays)
    return Collective(kind, size, _crossed(groups, mesh), found.times, shape, source[1] if source else "")


def _bits(dtype: str) -> int:
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8  # pred


def _groups(line: str, devices: int) -> list[np.ndarray]:
    """The positions of devices in the flattened mesh that take part together, in each of XLA's spellings."""
    if match := _IOTA.search(line):
        groups = list(_iota(match[3], match[4]).reshape(int(match[1]), int(match[2])))
    elif match := _MESH.search(line):
        groups = _mesh_groups(match)
    elif match := _LISTED.search(line):
        listed = [np.array(ids.split(","), int) for ids in re.findall(r"\{([\d,]+)\}", match[1])]
        groups = listed or [np.arange(devices)]
    else:
        raise ValueError(f"no groups of devices could be read from: {line.strip()[:300]}")
    if max(int(group.max()) for group in groups) >= devices:
        raise ValueError(f"the program is of more devices than the mesh's {devices}")
    return groups


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = [int(size) for size in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(axis) for axis in order.split(",")]).ravel() if order else ids.ravel()


def _mesh_groups(match: re.Match) -> list[np.ndarray]:
    """Groups over some axes of a mesh of XLA's own; 'a':(p)s is the part of size s of axis a that p parts precede."""
    sizes = {name: int(size) for name, size, *_ in _MESH_AXIS.findall(match[1])}
    shape = tuple(sizes.values())
    ids = _iota(match[2], match[3]) if match[2] else np.arange(math.prod(shape))
    group = np.stack(np.unravel_index(np.arange(ids.size), shape))
    for name, _, before, part in _MESH_AXIS.findall(match[4]):
        axis, whole = list(sizes).index(name), sizes[name]
        after = whole // (int(before) * int(part)) if part else 1
        group[axis] -= group[axis] // after % int(part or whole) * after
    keys = np.ravel_multi_index(tuple(group), shape)
    return [ids[keys == key] for key in np.unique(keys)]


def _crossed(groups: list[np.ndarray], mesh: Mesh) -> tuple[str, ...]:
    shape = tuple(mesh.shape.values())
    places = [np.stack(np.unravel_index(group, shape)) for group in groups]
    crossed = np.any([np.any(place != place[:, :1], axis=1) for place in places], axis=0)
    return tuple(name for name, is_crossed in zip(mesh.axis_names, crossed, strict=True) if is_crossed)
