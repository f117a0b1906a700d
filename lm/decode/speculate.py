"""Speculative sampling: a small model drafts tokens, one pass of the target judges them all, and nothing is lost.

Every answer has exactly the distribution that the target alone gives it (Leviathan et al. 2023, arXiv:2211.17192;
Chen et al. 2023, arXiv:2302.01318). A token drafted from q is accepted with probability min(1, p / q); the first one
rejected is replaced by a draw from max(p - q, 0), normalised; where all are accepted, one more is drawn from p. Both p
and q are the distributions after the request's strategy, as they are drawn from.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import UsageError
from lm.decode import choose, strategy
from lm.decode.generate import STOP_CHECK, Decoder, Prompt, repeated
from lm.decode.loop import Finish, Limits, State, extend, out_of_tokens
from lm.decode.request import Completion, Full, Request
from lm.decode.strategy import Strategy
from lm.model.cache import Cache, forget
from lm.model.score import token_log_probs
from lm.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Speculated:
    """Answers as of `generate`, with what it took in each row: passes of the target, and tokens drafted and accepted.

    The pass over the prompt, which gives the first token, counts as one.
    """

    completions: list[Completion]
    passes: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted; those after a rejected one count as drafted."""
        return float(self.accepted.sum() / max(self.drafted.sum(), 1))

    @property
    def passes_per_token(self) -> float:
        """Passes of the target over tokens of the answers; 1 without a draft."""
        return float(self.passes.sum() / max(sum(len(answer.tokens) for answer in self.completions), 1))


class Speculation(NamedTuple):
    """Everything about speculative sampling under way; a pytree.

    `state` is the target's; the draft's cache may lack the newest of its tokens, `before_last_B`. `passes_B`,
    `drafted_B` and `accepted_B` count for each row.
    """

    state: State
    draft_cache: Cache
    before_last_B: jax.Array
    passes_B: jax.Array
    drafted_B: jax.Array
    accepted_B: jax.Array


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models, the one that decides and the one that drafts `tokens` at a time; hashable."""

    target: Transformer
    draft: Transformer
    tokens: int


def speculate(
    target: Decoder,
    draft: Decoder,
    prompts: Sequence[Prompt],
    request: Request,
    draft_tokens: int = 4,
    *,
    first: int = 0,
) -> Speculated:
    """Answers of the target, distributed as `generate` gives them and sooner where the draft is often right.

    At temperature 0 they are the target's greedy answers. For other temperatures the same seed draws other tokens than
    `generate` does, from the same distribution. A row's answer does not depend on its neighbours; `first` is as in
    `Decoder.start`.

    Raises:
      UsageError: as `Decoder.start`; other tokenizers or vocabularies; an encoder in one of the two alone; no token to
        draft; a draft whose context is too short; a recurrent model, whose state cannot go back; or a constraint, which
        only `generate` holds answers to.
      RunError: as `Decoder.completions`.
    """
    if request.constraint:
        raise UsageError("speculative sampling has no constraints", where="constraint", do="Leave out the draft model.")
    for name, decoder in (("target", target), ("draft", draft)):
        if decoder.config.mixer.recurrent:
            what = f"the {name}'s mixer is {decoder.config.mixer}: its state cannot go back before a rejected token"
            raise UsageError(what, where="draft", do="Leave out the draft model.")
    if draft_tokens < 1:
        raise UsageError(f"{draft_tokens} tokens are to be drafted", where="draft_tokens", do="Draft at least 1.")
    if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
        raise UsageError("the draft has another tokenizer than the target", where="draft", do="Train it with the same.")
    if (draft.config.encoder is None) != (target.config.encoder is None):
        one, other = ("draft", "target") if draft.config.encoder else ("target", "draft")
        what = f"the {one} has an encoder and the {other} has none"
        raise UsageError(what, where="draft", do="Take two models with one, or two without.")
    if draft.config.vocab_size != target.config.vocab_size:
        sizes = f"the draft has a vocabulary of {draft.config.vocab_size}, the target of {target.config.vocab_size}"
        raise UsageError(sizes, where="draft", do="Probabilities are compared token by token: the two must agree.")
    ids = target.encode(prompts)
    session = target.start(ids, request, spare=draft_tokens + 1, first=first)
    read = draft.prefill(ids, dataclasses.replace(request, full=Full.STOP), spare=draft_tokens + 1)
    read = repeated(read, np.repeat(np.arange(len(ids)), request.samples))
    if bool(jnp.any(read.limits.tokens_B < session.limits.tokens_B)):
        what = f"the draft's context of {draft.config.predicted_length} tokens is too short"
        raise UsageError(what, where="draft", do="Ask for fewer tokens, or do without it.")
    before_last_B, drafted_B, accepted_B = (jnp.zeros(len(session.state.last_B), jnp.int32) for _ in range(3))
    under_way = Speculation(session.state, read.cache, before_last_B, drafted_B + 1, drafted_B, accepted_B)
    pair, params = Pair(target.model, draft.model, draft_tokens), (target.params, draft.params)
    at = 1
    while at < request.max_tokens and not session.done:
        at = at + STOP_CHECK if request.stops else request.max_tokens
        under_way = _advance(pair, params, under_way, request.steps, session.limits, jnp.int32(at))
        session = target.stopped(session, under_way.state)
        under_way = under_way._replace(state=session.state)
    counts = jax.device_get((under_way.passes_B, under_way.drafted_B, under_way.accepted_B))
    return Speculated(target.completions(session), *counts)


@partial(jax.jit, static_argnames=("pair",), donate_argnames=("under_way",))
def _advance(
    pair: Pair, params: tuple[Any, Any], under_way: Speculation, steps: Strategy, limits: Limits, until: jax.Array
) -> Speculation:
    """Goes on until every row has `until` tokens or has ended."""

    def unfinished(under_way: Speculation) -> jax.Array:
        state = under_way.state
        return jnp.any((state.finish_B == Finish.RUNNING) & (state.taken_B < until))

    return jax.lax.while_loop(unfinished, lambda now: _round(pair, params, now, steps, limits), under_way)


def _round(pair: Pair, params: tuple[Any, Any], now: Speculation, steps: Strategy, limits: Limits) -> Speculation:
    """One pass of the target over what was drafted: each running row gets from 1 to `pair.tokens` + 1 tokens.

    Rows end on the right: one that may draft M < `pair.tokens` tokens begins so many places later.
    """
    state, k = now.state, pair.tokens
    running_B = state.finish_B == Finish.RUNNING
    offset_B = k - jnp.where(running_B, jnp.clip(limits.tokens_B - state.taken_B - 1, 0, k), 0)
    key_B = choose.folded(state.key_B, state.taken_B)
    token_BT, q_BTV, counts_BTV, draft_cache = _draft(pair, params[1], now, steps, offset_B, key_B)

    length_B = state.cache.length_B
    logits_BTV, cache = extend(pair.target, params[0], token_BT, running_B * (k + 1 - offset_B), state.cache)
    processed_BTV = jax.vmap(partial(strategy.apply, steps), in_axes=1, out_axes=1)(logits_BTV, counts_BTV)
    uniform_BT = jax.vmap(lambda key: jax.random.uniform(key, (k,)))(choose.folded(key_B, k))
    testing_BT = jnp.arange(k)[None] >= offset_B[:, None]
    first_B, weight_BV = judge(jax.nn.softmax(processed_BTV, axis=2), q_BTV, token_BT[:, 1:], uniform_BT, testing_BT)
    final_B = choose.draw(jnp.log(weight_BV), choose.folded(key_B, k + 1))

    place_1T, first_B1 = jnp.arange(k + 1)[None], first_B[:, None]
    next_BT = jnp.where(place_1T == first_B1, final_B[:, None], jnp.roll(token_BT, -1, axis=1))
    given_BT = running_B[:, None] & (place_1T >= offset_B[:, None]) & (place_1T <= first_B1)
    end_BT = given_BT & jnp.any(next_BT[:, :, None] == limits.end_E[None, None], axis=2)
    given_BT = given_BT & (jnp.cumsum(end_BT, axis=1) - end_BT == 0)
    taken_B = state.taken_B + jnp.sum(given_BT, axis=1, dtype=jnp.int32)
    reason_B = jnp.where(taken_B >= limits.tokens_B, out_of_tokens(limits), Finish.RUNNING)
    reason_B = jnp.where(jnp.any(end_BT, axis=1), Finish.END, reason_B)

    row_B1 = jnp.arange(len(taken_B))[:, None]
    at_BT = jnp.where(given_BT, (state.taken_B - offset_B)[:, None] + place_1T, state.token_BG.shape[1])

    def record(kept_BG: jax.Array, value_BT: jax.Array) -> jax.Array:
        return kept_BG.at[row_B1, at_BT].set(value_BT, mode="drop")

    counts_BV = jax.tree.map(lambda counts_BTV: counts_BTV[row_B1[:, 0], first_B], counts_BTV)
    accepted_B = first_B - offset_B
    length_B = length_B + running_B * (1 + accepted_B)
    return Speculation(
        state._replace(
            cache=forget(cache, length_B),
            step=jnp.max(taken_B),
            taken_B=taken_B,
            last_B=jnp.where(running_B, final_B, state.last_B),
            token_BG=record(state.token_BG, next_BT),
            raw_BG=record(state.raw_BG, token_log_probs(logits_BTV, next_BT)),
            processed_BG=record(state.processed_BG, token_log_probs(processed_BTV, next_BT)),
            finish_B=jnp.where(running_B, reason_B, state.finish_B),
            counts_BV=_counted(counts_BV, final_B, running_B),
        ),
        draft_cache=forget(draft_cache, length_B),
        before_last_B=jnp.take_along_axis(token_BT, first_B1, axis=1)[:, 0],
        passes_B=now.passes_B + running_B,
        drafted_B=now.drafted_B + k - offset_B,
        accepted_B=now.accepted_B + accepted_B,
    )


def judge(
    p_BTV: jax.Array, q_BTV: jax.Array, draft_BT: jax.Array, uniform_BT: jax.Array, testing_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The place of the first rejected draft, or T where none is, and weights [B, V] to draw the token there from.

    `p_BTV` has T + 1 places, of which the last judges nothing. Drafts that are not `testing_BT` are padding.
    """
    q_BTV = jnp.pad(q_BTV, ((0, 0), (0, 1), (0, 0)))
    p_BT, q_BT = (jnp.take_along_axis(x[:, :-1], draft_BT[:, :, None], axis=2)[:, :, 0] for x in (p_BTV, q_BTV))
    accept_BT = (uniform_BT * q_BT < p_BT) | ~testing_BT
    first_B = jnp.sum(jnp.cumprod(accept_BT, axis=1), axis=1)
    p_BV, q_BV = (jnp.take_along_axis(x, first_B[:, None, None], axis=1)[:, 0] for x in (p_BTV, q_BTV))
    residual_BV = jnp.maximum(p_BV - q_BV, 0.0)
    # Where p and q are the same up to rounding, nothing may be left of a token rejected by rounding.
    return first_B, jnp.where(jnp.any(residual_BV > 0, axis=1, keepdims=True), residual_BV, p_BV)


def _draft(
    pair: Pair, params: Any, now: Speculation, steps: Strategy, offset_B: jax.Array, key_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, Cache]:
    """The newest token and the drafts after it [B, T + 1], what each was drawn from [B, T, V], counts, the cache.

    `counts_BTV` are those before the token after each place; until its `offset_B` a row stands still.
    """
    state = now.state
    running_B = (state.finish_B == Finish.RUNNING).astype(jnp.int32)

    def drawn(logits_BV: jax.Array, counts_BV: jax.Array | None, place: jax.Array) -> tuple[jax.Array, ...]:
        processed_BV = strategy.apply(steps, logits_BV, counts_BV)
        token_B = choose.draw(processed_BV, choose.folded(key_B, place))
        return jnp.where(place >= offset_B, token_B, state.last_B), jax.nn.softmax(processed_BV, axis=1)

    def one_more(carry: Any, place: jax.Array) -> Any:
        token_B, logits_BV, counts_BV, cache = carry
        drafting_B = place > offset_B
        more_B1V, cache = extend(pair.draft, params, token_B[:, None], drafting_B.astype(jnp.int32), cache)
        logits_BV = jnp.where(drafting_B[:, None], more_B1V[:, 0], logits_BV)
        counts_BV = _counted(counts_BV, token_B, drafting_B)
        token_B, q_BV = drawn(logits_BV, counts_BV, place)
        return (token_B, logits_BV, counts_BV, cache), (token_B, q_BV, counts_BV)

    # Two tokens in one call, were it only one that is new: so that the slots of forgotten tokens are used again.
    pair_B2 = jnp.stack([now.before_last_B, state.last_B], axis=1)
    behind_B = state.cache.length_B - now.draft_cache.length_B
    logits_B1V, cache = extend(pair.draft, params, pair_B2, running_B * (1 + behind_B), now.draft_cache, last=1)
    logits_BV = logits_B1V[:, 0]
    token_B, q_BV = drawn(logits_BV, state.counts_BV, jnp.int32(0))
    (last_B, _, counts_BV, cache), rest = jax.lax.scan(
        one_more, (token_B, logits_BV, state.counts_BV, cache), jnp.arange(1, pair.tokens, dtype=jnp.int32)
    )
    first = (token_B, q_BV, state.counts_BV)
    token_BT, q_BTV, counts_BTV = jax.tree.map(
        lambda x, more: jnp.concatenate([x[:, None], jnp.moveaxis(more, 0, 1)], axis=1), first, rest
    )
    counts_BTV = jax.tree.map(
        lambda x, more: jnp.concatenate([x, more[:, None]], axis=1),
        counts_BTV,
        _counted(counts_BV, last_B, pair.tokens > offset_B),
    )
    return jnp.concatenate([state.last_B[:, None], token_BT], axis=1), q_BTV, counts_BTV, cache


def _counted(counts_BV: jax.Array | None, token_B: jax.Array, adding_B: jax.Array) -> jax.Array | None:
    return jax.tree.map(
        lambda counts: counts.at[jnp.arange(len(token_B)), token_B].add(adding_B.astype(jnp.int32)), counts_BV
    )
