"""Run with eight virtual devices: compiles a lookup, as the model constrains it, and its gradient for every mesh.

What XLA has to say of it is on standard error. A whole step takes ten times as long to compile.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from experiments.meshes.eight import CASES, LENGTH, ROWS, VOCABULARY, WIDTH
from lm.model.block import RESIDUAL
from lm.model.transformer import LOOKED_UP
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import batch_sharding, flax_rules, sharded


def gradient(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    def loss(table_VD: jax.Array) -> jax.Array:
        x_BTD = nn.with_logical_constraint(jnp.take(table_VD, tokens_BT, axis=0), LOOKED_UP)
        return jnp.sum(jnp.sin(nn.with_logical_constraint(x_BTD, RESIDUAL)))

    return jax.grad(loss)(table_VD)


def compile_on(mesh: Mesh) -> None:
    cut = NamedSharding(mesh, nn.logical_to_mesh_axes(("vocab", "embed"), flax_rules(())))
    table_VD = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32, sharding=cut)
    tokens_BT = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=batch_sharding(mesh))
    with sharded(mesh):
        jax.jit(gradient, out_shardings=cut).lower(table_VD, tokens_BT).compile()


if __name__ == "__main__":
    for case in CASES.values():
        compile_on(make_mesh(MeshConfig(**{"data": 1, **case.axes})))
    print(len(CASES))
