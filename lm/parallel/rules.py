"""Where each logical axis of the model lies on the mesh: one ordered list, first match wins."""

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# (logical axis, mesh axes). What is not listed is replicated.
RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
)


def placed(boxed_state, mesh: Mesh):
    """Shapes, dtypes and shardings of an abstract state whose parameters carry Linen's logical axis names."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed_state),
        nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed_state), mesh, RULES),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch, spread over every device."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def row_block(mesh: Mesh) -> tuple[int, int]:
    """(index, count): of `count` equal blocks of a batch's rows, this process's devices hold rows of `index` only.

    Processes that an axis other than those of "batch" sets apart hold the same block.
    """
    # As many rows and columns as devices divide over any axes.
    held = batch_sharding(mesh).addressable_devices_indices_map((mesh.size, mesh.size))
    spans = [index[0].indices(mesh.size) for index in held.values() if index is not None]
    first, end = min(start for start, _, _ in spans), max(stop for _, stop, _ in spans)
    size = end - first
    # A block that other blocks of its size do not line up with is left for the whole batch, which is always right.
    return (first // size, mesh.size // size) if first % size == 0 == mesh.size % size else (0, 1)


def put_batch(batch: dict, mesh: Mesh) -> dict:
    """A global batch from this process's block of its rows (`row_block`): NumPy arrays in, sharded JAX arrays out."""
    if jax.process_count() == 1:
        return jax.device_put(batch, batch_sharding(mesh))
    index, count = row_block(mesh)
    return _global(batch, mesh, index, count)


def put_whole(batch: dict, mesh: Mesh) -> dict:
    """A global batch of which every process has all rows."""
    return jax.device_put(batch, batch_sharding(mesh)) if jax.process_count() == 1 else _global(batch, mesh, 0, 1)


def _global(batch: dict, mesh: Mesh, index: int, count: int) -> dict:
    def placed_rows(block: np.ndarray) -> jax.Array:
        shape, before = (len(block) * count, *block.shape[1:]), len(block) * index

        def part(place: tuple[slice, ...] | None) -> np.ndarray:
            assert place is not None  # JAX's type has it, and it never is
            first, end, _ = place[0].indices(shape[0])
            return block[(slice(first - before, end - before), *place[1:])]

        return jax.make_array_from_callback(shape, batch_sharding(mesh), part)

    return jax.tree.map(placed_rows, batch)
