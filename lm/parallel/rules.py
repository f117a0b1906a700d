"""Where each logical axis of the model lies on the mesh: one ordered list, first match wins."""

import flax.linen as nn
import jax
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


def put_batch(batch: dict, mesh: Mesh) -> dict:
    """A global batch from this process's rows (NumPy arrays in, sharded JAX arrays out)."""
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
