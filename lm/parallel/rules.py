"""Where each logical axis of the model lies on the mesh: one ordered list, first match wins.

The model names what the axes of its arrays are. Which devices they are cut over is said here, and may be said otherwise
by a run: its own rules (`config.mesh.rules`) are looked up before these. Where two axes of one array want the same mesh
axis, the rule nearer the top has it and the other axis stays whole: `fsdp` cuts the rows of a batch, and the width of
parameters, but not the width of activations.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.base.config import nearest
from lm.base.errors import UsageError

AXES = ("replica", "data", "fsdp", "expert", "sequence", "tensor")  # of the mesh, the slowest network first
LOGICAL = (
    *("batch", "lookup", "sequence", "keys"),  # rows, those out of a table, positions that predict or are attended to
    *("embed", "norm", "mlp", "heads", "kv_heads", "head"),  # widths: of matrices, of scales, of one head
    *("hidden", "gates"),  # the width of a recurrent state, and what is computed as often
    *("vocab", "position", "experts", "patch", "layers"),
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Cuts a logical axis over mesh axes, the first one outermost; over none, it is whole on every device.

    Raises:
      UsageError: no such logical axis or mesh axis, or a mesh axis twice.
    """

    axis: str
    over: tuple[str, ...]

    def __post_init__(self) -> None:
        where = "config.mesh.rules"
        if self.axis not in LOGICAL:
            raise UsageError(f"no logical axis is called '{self.axis}'", where=where, do=nearest(self.axis, LOGICAL))
        for name in self.over:
            if name not in AXES:
                raise UsageError(f"no mesh axis is called '{name}'", where=where, do=nearest(name, AXES))
        if len(set(self.over)) < len(self.over):
            raise UsageError(f"'{self.axis}' is cut twice over the same mesh axis: {self.over}", where=where)


Rules = tuple[Rule, ...]

# A logical axis without a rule is whole on every device.
RULES: Rules = (
    # Rows use the axis of experts too: a device takes its own rows through all experts, and dense models lose nothing.
    Rule("batch", ("replica", "data", "fsdp", "expert")),
    Rule("lookup", ("replica", "data", "expert")),  # fsdp cuts their widths, as it does the table's
    Rule("sequence", ("sequence",)),
    Rule("experts", ("expert",)),
    Rule("vocab", ("tensor",)),
    Rule("heads", ("tensor",)),
    Rule("kv_heads", ("tensor",)),
    Rule("mlp", ("tensor",)),
    Rule("hidden", ("tensor",)),
    Rule("embed", ("fsdp",)),
)


def cut_over(overrides: Rules = ()) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each logical axis that has a rule, in the order of the rules; `overrides` come first."""
    first: dict[str, tuple[str, ...]] = {}
    for rule in (*overrides, *RULES):
        first.setdefault(rule.axis, rule.over)
    return first


def flax_rules(overrides: Rules) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """The rules as Linen takes them."""
    return tuple((axis, over or None) for axis, over in cut_over(overrides).items())


@contextlib.contextmanager
def sharded(mesh: Mesh, overrides: Rules = ()) -> Iterator[None]:
    """What is traced within it obeys the logical names of the model; without it they mean nothing."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(flax_rules(overrides)):
        yield


def placed(boxed_state, mesh: Mesh, overrides: Rules = ()):
    """Shapes, dtypes and shardings of an abstract state whose parameters carry Linen's logical axis names."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed_state),
        nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed_state), mesh, flax_rules(overrides)),
    )


@functools.cache
def batch_sharding(mesh: Mesh, overrides: Rules = ()) -> NamedSharding:
    """Of the arrays [B, T] of a batch."""
    spec = nn.logical_to_mesh_axes(("batch", "sequence"), flax_rules(overrides))
    return NamedSharding(mesh, spec or PartitionSpec())


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def row_block(mesh: Mesh, overrides: Rules = ()) -> tuple[int, int]:
    """(index, count): of `count` equal blocks of a batch's rows, this process's devices hold rows of `index` only.

    Processes that an axis other than those of "batch" sets apart hold the same block.
    """
    # As many rows and columns as devices divide over any axes.
    held = batch_sharding(mesh, overrides).addressable_devices_indices_map((mesh.size, mesh.size))
    spans = [index[0].indices(mesh.size) for index in held.values() if index is not None]
    first, end = min(start for start, _, _ in spans), max(stop for _, stop, _ in spans)
    size = end - first
    # A block that other blocks of its size do not line up with is left for the whole batch, which is always right.
    return (first // size, mesh.size // size) if first % size == 0 == mesh.size % size else (0, 1)


def put_batch(batch: dict, mesh: Mesh, overrides: Rules = ()) -> dict:
    """A global batch from this process's block of its rows (`row_block`): NumPy arrays in, sharded JAX arrays out."""
    if jax.process_count() == 1:
        return jax.device_put(batch, batch_sharding(mesh, overrides))
    return _global(batch, batch_sharding(mesh, overrides), *row_block(mesh, overrides))


def put_whole(batch: dict, mesh: Mesh, overrides: Rules = ()) -> dict:
    """A global batch of which every process has all rows."""
    sharding = batch_sharding(mesh, overrides)
    return jax.device_put(batch, sharding) if jax.process_count() == 1 else _global(batch, sharding, 0, 1)


def check_divides(sizes: Mapping[str, tuple[str, int]], mesh: Mesh, overrides: Rules = ()) -> None:
    """Refuses sizes that the mesh cannot cut into equal parts, all of them at once.

    Args:
      sizes: for logical axes, what the user calls the dimension and how long it is.

    Raises:
      UsageError: naming each dimension, its size, the mesh axes that cut it and into how many parts.
    """
    uneven = []
    for axis, over in cut_over(overrides).items():
        cuts = {name: mesh.shape[name] for name in over if mesh.shape[name] > 1}
        if axis in sizes and sizes[axis][1] % math.prod(cuts.values()):
            name, size = sizes[axis]
            uneven.append(f"{name} {size} over {' x '.join(f'{cut} {parts}' for cut, parts in cuts.items())}")
    if uneven:
        raise UsageError(
            f"these do not divide: {'; '.join(uneven)}",
            where="config.mesh",
            do="Change a size, or leave an axis whole with a rule of config.mesh.rules.",
        )


def _global(batch: dict, sharding: NamedSharding, index: int, count: int) -> dict:
    def placed_rows(block: np.ndarray) -> jax.Array:
        shape, before = (len(block) * count, *block.shape[1:]), len(block) * index

        def part(place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None  # JAX's type has it, and it never is
            first, end, _ = place[0].indices(shape[0])
            return block[(slice(first - before, end - before), *place[1:])]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(placed_rows, batch)
