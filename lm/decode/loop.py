"""Prefill and the loop of single tokens: one program on the device, no Python in between."""

import enum
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from lm.decode import choose, constrain, strategy
from lm.decode.automaton import START
from lm.decode.compiled import compiled
from lm.decode.constrain import Automaton
from lm.decode.strategy import Strategy
from lm.model.cache import Cache
from lm.model.score import token_log_probs
from lm.model.transformer import Transformer


class Finish(enum.IntEnum):
    """Why a row ended; RUNNING while it has not."""

    RUNNING = 0
    END = 1  # an end token
    STOP = 2  # a stop string
    LENGTH = 3  # as many tokens as were asked for
    CONTEXT = 4  # no room for another token


class State(NamedTuple):
    """Everything about a decoding under way; a pytree.

    `step` (int32) tokens of the answers are chosen, `taken_B` of each row's own before it ended; they stand in
    `token_BG`, with log-probabilities in nats under the model alone (`raw_BG`) and under constraint and strategy
    (`processed_BG`). `last_B` is the newest token, which the cache has not seen yet. `finish_B` holds `Finish` values,
    and once set they stay. `key_B` is a random key a row: a row's sample does not depend on its neighbours. `counts_BV`
    is kept where the strategy needs it, `automaton_B` (int32 states) where answers are constrained.
    """

    cache: Cache
    step: jax.Array
    taken_B: jax.Array
    last_B: jax.Array
    token_BG: jax.Array
    raw_BG: jax.Array
    processed_BG: jax.Array
    finish_B: jax.Array
    key_B: jax.Array
    counts_BV: jax.Array | None
    automaton_B: jax.Array | None = None


class Limits(NamedTuple):
    """When rows end: `end_E` (int32, -1: none) are the end tokens, `tokens_B` how many tokens each may have at most.

    `full_B` marks rows whose limit is the room that is left and not what was asked for. With an `automaton`, a row also
    ends (END) where nothing can follow.
    """

    end_E: jax.Array
    tokens_B: jax.Array
    full_B: jax.Array
    automaton: Automaton | None = None


def extend(
    model: Transformer,
    params: Any,
    tokens_BT: jax.Array,
    count_B: jax.Array,
    cache: Cache,
    *,
    fresh: bool = False,
    last: int | None = None,
) -> tuple[jax.Array, Cache]:
    """`Transformer.extend` with these parameters."""
    result = model.apply(
        {"params": params}, tokens_BT, count_B, cache, fresh=fresh, last=last, method=Transformer.extend
    )
    return cast(tuple[jax.Array, Cache], result)


def prefill(
    model: Transformer, params: Any, tokens_BT: ArrayLike, count_B: ArrayLike, cache: Cache, *, fresh: bool
) -> tuple[jax.Array, Cache]:
    """The logits [B, V] after the last token of each row, and the cache with all of them; rows end on the right.

    `cache` is written over.
    """
    result = prefill_program()(model, params, tokens_BT, count_B, cache, fresh=fresh)
    return cast(tuple[jax.Array, Cache], result)


def prefill_program() -> Any:
    """What `prefill` calls, compiled once for a shape."""
    return compiled(_prefill, several=True, static=("model", "fresh"), donated="cache")


def _prefill(
    model: Transformer, params: Any, tokens_BT: jax.Array, count_B: jax.Array, cache: Cache, *, fresh: bool
) -> tuple[jax.Array, Cache]:
    logits_BTV, cache = extend(model, params, tokens_BT, count_B, cache, fresh=fresh, last=1)
    return logits_BTV[:, 0], cache


@partial(jax.jit, static_argnames=("room",), donate_argnames=("cache",))
def begin(
    logits_BV: jax.Array,
    cache: Cache,
    steps: Strategy,
    limits: Limits,
    key_B: jax.Array,
    counts_BV: jax.Array | None,
    *,
    room: int,
) -> State:
    """The state after the first token of the answer, with room for `room` of them; holds `cache` itself."""
    B = logits_BV.shape[0]
    state = State(
        cache=cache,
        step=jnp.zeros((), jnp.int32),
        taken_B=jnp.zeros(B, jnp.int32),
        last_B=jnp.zeros(B, jnp.int32),
        token_BG=jnp.zeros((B, room), jnp.int32),
        raw_BG=jnp.zeros((B, room), jnp.float32),
        processed_BG=jnp.zeros((B, room), jnp.float32),
        finish_B=jnp.where(limits.tokens_B > 0, Finish.RUNNING, out_of_tokens(limits)),
        key_B=key_B,
        counts_BV=counts_BV,
        automaton_B=None if limits.automaton is None else jnp.full(B, START, jnp.int32),
    )
    return _take(state, logits_BV, steps, limits)


def advance(model: Transformer, params: Any, state: State, steps: Strategy, limits: Limits, until: jax.Array) -> State:
    """Goes on until `until` tokens of the answer are chosen or every row has ended; `state` is written over."""
    return cast(State, advance_program(len(state.taken_B))(model, params, state, steps, limits, until))


def advance_program(rows: int) -> Any:
    """What `advance` calls for that many rows, compiled once for a shape."""
    return compiled(_advance, several=rows > 1, static=("model",), donated="state")


def _advance(model: Transformer, params: Any, state: State, steps: Strategy, limits: Limits, until: jax.Array) -> State:
    def unfinished(state: State) -> jax.Array:
        return (state.step < until) & jnp.any(state.finish_B == Finish.RUNNING)

    def one_token(state: State) -> State:
        running_B = (state.finish_B == Finish.RUNNING).astype(jnp.int32)
        logits_BTV, cache = extend(model, params, state.last_B[:, None], running_B, state.cache)
        return _take(state._replace(cache=cache), logits_BTV[:, 0], steps, limits)

    return jax.lax.while_loop(unfinished, one_token, state)


def _take(state: State, logits_BV: jax.Array, steps: Strategy, limits: Limits) -> State:
    """Chooses a token in every row that is still running."""
    automaton, automaton_B = limits.automaton, state.automaton_B
    allowed_BV = logits_BV
    if automaton is not None and automaton_B is not None:
        left_B = limits.tokens_B - state.step
        allowed_BV = constrain.mask(automaton, automaton_B, logits_BV, limits.end_E, left_B)

    def draw() -> tuple[jax.Array, jax.Array]:
        processed_BV = strategy.apply(steps, allowed_BV, state.counts_BV)
        token_B = choose.draw(processed_BV, choose.folded(state.key_B, state.step))
        return token_B, _log_probs(processed_BV, token_B)

    def take_highest(before: Strategy) -> tuple[jax.Array, jax.Array]:
        token_B, highest_B = choose.first_highest(strategy.apply(before, allowed_BV, state.counts_BV))
        return token_B, jnp.where(highest_B == choose.LOWEST, jnp.nan, 0.0)

    # The draw would find the same token where the strategy is greedy, at a price of several passes over all logits.
    greedy = strategy.greedy(steps)
    if greedy is None:
        token_B, after_B = draw()
    else:
        before, always = greedy
        token_B, after_B = jax.lax.cond(always, lambda: take_highest(before), draw)
    running_B = state.finish_B == Finish.RUNNING
    token_B = jnp.where(running_B, token_B, 0)

    def record(kept_BG: jax.Array, value_B: jax.Array) -> jax.Array:
        value_B = jnp.where(running_B, value_B, 0)
        return jax.lax.dynamic_update_slice(kept_BG, value_B[:, None], (0, state.step))

    raw_B = _log_probs(logits_BV, token_B)
    ended_B = jnp.any(token_B[:, None] == limits.end_E[None, :], axis=1)
    if automaton is not None and automaton_B is not None:
        automaton_B = jnp.where(running_B, constrain.move(automaton, automaton_B, token_B), automaton_B)
        ended_B |= automaton.last_S[automaton_B]
    out_B = state.step + 1 >= limits.tokens_B
    reason_B = jnp.where(ended_B, Finish.END, jnp.where(out_B, out_of_tokens(limits), Finish.RUNNING))
    counts_BV = state.counts_BV
    if counts_BV is not None:
        counts_BV = counts_BV.at[jnp.arange(len(token_B)), token_B].add(running_B.astype(jnp.int32))
    return state._replace(
        step=state.step + 1,
        taken_B=state.taken_B + running_B,
        last_B=jnp.where(running_B, token_B, state.last_B),
        token_BG=record(state.token_BG, token_B),
        raw_BG=record(state.raw_BG, raw_B),
        processed_BG=record(state.processed_BG, after_B),
        finish_B=jnp.where(running_B, reason_B, state.finish_B),
        counts_BV=counts_BV,
        automaton_B=automaton_B,
    )


def _log_probs(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    return token_log_probs(logits_BV[:, None], token_B[:, None])[:, 0]


def out_of_tokens(limits: Limits) -> jax.Array:
    """Why a row ends at its limit [B]."""
    return jnp.where(limits.full_B, Finish.CONTEXT, Finish.LENGTH)
