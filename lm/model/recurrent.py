"""Recurrent layers: what a position learns of earlier ones is a state, handed from each to the next.

The products of all inputs are one, before the scan over time; in it is only what needs the state before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.model.cache import Memory
from lm.model.config import Mixer, ModelConfig
from lm.model.layers import Projection, named, normal

FORGET = 1.0
"""What is added to the forget gate of an LSTM, so that it begins by remembering (Gers et al. 2000; Jozefowicz et al.
2015, "An Empirical Exploration of Recurrent Network Architectures"). Its bias begins at 0 as all do."""

State = tuple[jax.Array, ...]
"""What goes from position to position, float32 [B, D] each; the first is what a layer gives."""


class Course(NamedTuple):
    """Where rows begin, the same for all layers.

    At `begins_BT` the state is the one before the row: at the first token of a document, and after left padding. Rows
    that are not among `reads_B` have no token, and keep their state. None: at the first position alone; all rows.
    """

    begins_BT: jax.Array | None = None
    reads_B: jax.Array | None = None


def lstm(input_BJD: jax.Array, product_BJD: jax.Array, state: State) -> State:
    """Input, forget, candidate and output gate: c' = f c + i g, h' = o tanh c'."""
    i_BD, f_BD, g_BD, o_BD = jnp.unstack(input_BJD + product_BJD, axis=1)
    c_BD = nn.sigmoid(f_BD + FORGET) * state[1] + nn.sigmoid(i_BD) * jnp.tanh(g_BD)
    return nn.sigmoid(o_BD) * jnp.tanh(c_BD), c_BD


def gru(input_BJD: jax.Array, product_BJD: jax.Array, state: State) -> State:
    """Reset, update and candidate: n = tanh(input + r product), h' = (1 - z) n + z h."""
    (h_BD,) = state
    r_BD, z_BD = jnp.unstack(nn.sigmoid(input_BJD[:, :2] + product_BJD[:, :2]), axis=1)
    n_BD = jnp.tanh(input_BJD[:, 2] + r_BD * product_BJD[:, 2])
    return (n_BD + z_BD * (h_BD - n_BD),)


Cell = Callable[[jax.Array, jax.Array, State], State]
CELLS: dict[Mixer, Cell] = {Mixer.LSTM: lstm, Mixer.GRU: gru}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_time(
    cell: Cell,
    input_TBJD: jax.Array,
    kernel_DJD: jax.Array,
    bias_JD: jax.Array,
    start: State,
    begins_TB: jax.Array | None = None,
) -> tuple[State, jax.Array]:
    """The state after the last position, and what each gives, float32 [T, B, D].

    Products with the state are in the type of the kernel, with float32 sums. The gradient of the kernel is one product
    of all positions, after the scan back: within it devices would send each other their share at every position.
    """
    return _forward(cell, input_TBJD, kernel_DJD, bias_JD, start, begins_TB)[0]


def _entered(start: State, state: State, begins_B: jax.Array | None) -> State:
    if begins_B is None:
        return state
    return jax.tree.map(lambda first, now: jnp.where(begins_B[:, None], first, now), start, state)


def _forward(
    cell: Cell,
    input_TBJD: jax.Array,
    kernel_DJD: jax.Array,
    bias_JD: jax.Array,
    start: State,
    begins_TB: jax.Array | None,
) -> tuple[tuple[State, jax.Array], Any]:
    def one(state: State, at: tuple[jax.Array, jax.Array | None]) -> tuple[State, Any]:
        input_BJD, begins_B = at
        before = _entered(start, state, begins_B)
        h_BD = before[0].astype(kernel_DJD.dtype)
        product_BJD = jnp.tensordot(h_BD, kernel_DJD, 1, preferred_element_type=jnp.float32) + bias_JD[None]
        state = cell(input_BJD.astype(jnp.float32), product_BJD, before)
        return state, (state[0], before, product_BJD)

    end, (h_TBD, before, product_TBJD) = jax.lax.scan(one, start, (input_TBJD, begins_TB))
    return (end, h_TBD), (kernel_DJD, (input_TBJD, begins_TB, before, product_TBJD))


def _backward(cell: Cell, saved: Any, gradients: tuple[State, jax.Array]) -> tuple[Any, ...]:
    kernel_DJD, through = saved
    of_end, of_h_TBD = gradients

    def one(carry: tuple[State, State], at: Any) -> tuple[tuple[State, State], tuple[jax.Array, jax.Array]]:
        (of_start, of_state), ((input_BJD, begins_B, before, product_BJD), of_h_BD) = carry, at
        _, pull = jax.vjp(cell, input_BJD.astype(jnp.float32), product_BJD, before)
        of_input_BJD, of_product_BJD, (of_first_BD, *rest) = pull((of_state[0] + of_h_BD, *of_state[1:]))
        rounded_BJD = of_product_BJD.astype(kernel_DJD.dtype)
        of_first_BD += jnp.tensordot(rounded_BJD, kernel_DJD, ((1, 2), (1, 2)), preferred_element_type=jnp.float32)
        zeros = jax.tree.map(jnp.zeros_like, of_start)
        _, pull = jax.vjp(partial(_entered, begins_B=begins_B), zeros, zeros)
        more, of_state = pull((of_first_BD, *rest))
        return (jax.tree.map(jnp.add, of_start, more), of_state), (of_input_BJD.astype(input_BJD.dtype), of_product_BJD)

    nothing = jax.tree.map(jnp.zeros_like, of_end)
    (of_start, of_state), (of_input_TBJD, of_product_TBJD) = jax.lax.scan(
        one, (nothing, of_end), (through, of_h_TBD), reverse=True
    )
    _, _, before, _ = through
    h_TBD, of_rounded_TBJD = (x.astype(kernel_DJD.dtype) for x in (before[0], of_product_TBJD))
    of_kernel_DJD = jnp.tensordot(h_TBD, of_rounded_TBJD, ((0, 1), (0, 1)), preferred_element_type=jnp.float32)
    of_start = jax.tree.map(jnp.add, of_start, of_state)
    return of_input_TBJD, of_kernel_DJD.astype(kernel_DJD.dtype), jnp.sum(of_product_TBJD, (0, 1)), of_start, None


over_time.defvjp(_forward, _backward)


class Recurrence(nn.Module):
    """An LSTM or a GRU of the model's width. With a memory the states go through it, and it is returned too.

    Biases are those of the inputs' products; a GRU's candidate has one of the state's too, inside the reset.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, course: Course, memory: Memory | None) -> tuple[jax.Array, Memory | None]:
        config, (B, _, D) = self.config, x_BTD.shape
        dtype, J, axes = config.dtype.value, config.mixer.gates, ("embed", "gates", "hidden")
        into = Projection((D, J, D), axes, dtype, config.matrix_scale, bias=config.bias, name="input")
        # Every position needs the one before it, and the whole kernel.
        input_TBJD = nn.with_logical_constraint(into(x_BTD.swapaxes(0, 1)), (None, "batch", "gates", "hidden"))
        kernel_DJD = self.param("kernel", normal(config.matrix_scale, axes), (D, J, D), jnp.float32)
        kernel_DJD = nn.with_logical_constraint(kernel_DJD.astype(dtype), (None, "gates", "hidden"))
        bias_JD = jnp.zeros((J, D))
        if config.bias and config.mixer is Mixer.GRU:
            zeros = named(nn.initializers.zeros_init(), ("hidden",))
            bias_JD = bias_JD.at[2].set(self.param("bias", zeros, (D,), jnp.float32))
        start: State = (jnp.zeros((B, D)),) * config.mixer.states
        if memory is not None:
            start = tuple(_of_layer(state_LBD, memory) for state_LBD in memory.cache.state_LBD)
        begins_TB = None if course.begins_BT is None else course.begins_BT.T
        end, h_TBD = over_time(CELLS[config.mixer], input_TBJD, kernel_DJD, bias_JD, start, begins_TB)
        if memory is not None:
            memory = _after(memory, course, start, end)
        return h_TBD.swapaxes(0, 1).astype(dtype), memory


def _of_layer(state_LBD: jax.Array, memory: Memory) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(state_LBD, memory.layer, keepdims=False)


def _after(memory: Memory, course: Course, start: State, end: State) -> Memory:
    """The memory with the states of a layer after its tokens."""
    cache, layer = memory
    if (reads_B := course.reads_B) is not None:
        end = jax.tree.map(lambda old, new: jnp.where(reads_B[:, None], new, old), start, end)
    state_LBD = tuple(
        jax.lax.dynamic_update_index_in_dim(before_LBD, end_BD, layer, 0)
        for before_LBD, end_BD in zip(cache.state_LBD, end, strict=True)
    )
    return Memory(cache._replace(state_LBD=state_LBD), layer)
