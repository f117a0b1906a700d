"""A mixture of experts: many position-wise sublayers, of which a router chooses a few for each token.

No expert has a capacity and no token is dropped: each row's tokens are sorted by expert, and one product takes every
group of them to its own matrix (`jax.lax.ragged_dot`).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.model.config import ModelConfig
from lm.model.feedforward import PositionWise, hidden
from lm.model.layers import Projection, normal, residual_std

TOLD = "router"
"""The collection in which each layer's router tells its losses where it is mutable: not in evaluation and decoding."""

# Rows [B, N, in], each in groups of its own, by [E, in, out].
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((2,), (1,)), ((), ())), lhs_ragged_dimensions=(1,), rhs_group_dimensions=(0,)
)


class GroupedProjection(nn.Module):
    """A matrix of each expert, [E, in, out]; `sizes_BE` says how many of a row's first vectors go to each in turn."""

    shape: tuple[int, int, int]
    axes: tuple[str, ...]
    dtype: DTypeLike
    std: float

    @nn.compact
    def __call__(self, x_BND: jax.Array, sizes_BE: jax.Array) -> jax.Array:
        kernel = self.param("kernel", normal(self.std, self.axes), self.shape, jnp.float32)
        # Every row goes through all experts, whole but for the axis that heads and hidden units are cut over.
        whole = tuple(name if name == "mlp" else None for name in self.axes)
        kernel = nn.with_logical_constraint(kernel.astype(self.dtype), whole)
        return jax.lax.ragged_dot_general(x_BND, kernel, sizes_BE, _BY_GROUP)


class MixtureOfExperts(nn.Module):
    """The chosen experts' results by the router's weights, and those of the experts that all tokens share.

    The router is in float32 (Fedus et al. 2021, arXiv:2101.03961, section 2.4): a rounded one chooses others. Of equal
    logits the first expert is chosen.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config, experts = self.config, self.config.experts
        assert experts is not None
        (B, T, D), E, k = x_BTD.shape, experts.count, experts.chosen
        router = Projection((D, E), ("embed", "experts"), jnp.float32, config.matrix_scale, name="router")
        logits_BTE = nn.with_logical_constraint(router(x_BTD.astype(jnp.float32)), ("batch", "sequence", None))
        logits_BTk, chosen_BTk = jax.lax.top_k(logits_BTE, k)
        share_BTE = jax.nn.softmax(logits_BTE)
        weight_BTk = (
            jax.nn.softmax(logits_BTk)
            if experts.normalised
            else jnp.take_along_axis(share_BTE, chosen_BTk, axis=-1, mode="clip")
        )
        is_chosen_BTkE = jax.nn.one_hot(chosen_BTk, E, dtype=jnp.int32)
        sizes_BE = jnp.sum(is_chosen_BTkE, axis=(1, 2))
        if not self.is_initializing():
            mean_E = jnp.mean(share_BTE, axis=(0, 1))
            load_E = jnp.sum(sizes_BE, axis=0) / (B * T * k)
            self._tell("balance_loss", E * jnp.sum(load_E * mean_E))
            self._tell("router_z_loss", jnp.mean(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))))

        order_BN = jnp.argsort(chosen_BTk.reshape(B, T * k), axis=1)  # stable: N = T k choices by expert
        sorted_BND = jnp.take_along_axis(x_BTD, order_BN[..., None] // k, axis=1, mode="clip")
        out_BND = self._experts(nn.with_logical_constraint(sorted_BND, ("batch", None, None)), sizes_BE)
        back_BN = jnp.argsort(order_BN, axis=1)
        out_BTkD = jnp.take_along_axis(out_BND, back_BN[..., None], axis=1, mode="clip").reshape(B, T, k, D)
        y_BTD = jnp.sum(out_BTkD * weight_BTk[..., None].astype(x_BTD.dtype), axis=2)
        if experts.shared:
            y_BTD = y_BTD + PositionWise(config, experts.shared * config.d_ff, name="shared")(x_BTD)
        return y_BTD

    def _experts(self, x_BND: jax.Array, sizes_BE: jax.Array) -> jax.Array:
        config, dtype, E = self.config, self.config.dtype.value, sizes_BE.shape[1]
        D, F = config.d_model, config.d_ff
        into, out = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")

        def widened(name: str) -> jax.Array:
            return GroupedProjection((E, D, F), into, dtype, config.matrix_scale, name=name)(x_BND, sizes_BE)

        hidden_BNF = nn.with_logical_constraint(hidden(config.feed_forward, widened), ("batch", None, "mlp"))
        y_BND = GroupedProjection((E, F, D), out, dtype, residual_std(config), name="down")(hidden_BNF, sizes_BE)
        return nn.with_logical_constraint(y_BND, ("batch", None, "embed"))

    def _tell(self, name: str, value: jax.Array) -> None:
        self.sow(TOLD, name, value, init_fn=lambda: None, reduce_fn=lambda _, new: new)


def router_losses(told: Any) -> dict[str, jax.Array]:
    """What routers told of a batch (`TOLD`), each a mean over layers, float32; nothing of a model without experts.

    "balance_loss" is E times the sum over experts of their share of choices times their mean probability, 1 where all
    are equal (Fedus et al. 2021, eq. 4); "router_z_loss" the mean of logsumexp(logits)^2 (Zoph et al. 2022,
    arXiv:2202.08906, eq. 5).
    """
    stacks = [stack["feed_forward"] for stack in told.get(TOLD, {}).values()]
    return jax.tree.map(lambda *value_L: jnp.mean(jnp.concatenate(value_L)), *stacks) if stacks else {}
