"""Beam search: the likeliest answers under a length penalty, found on the device with the cache of single tokens.

The score of an answer y of n tokens, an end token among them, is log p(y) / penalty(n): its log-probability in nats
under the model over one of the two published penalties (`LengthForm`). With `length_alpha` 0 it is log p(y); since
log-probabilities are negative, a larger one is kinder to long answers, a negative one to short ones.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import RunError, UsageError
from lm.decode.compiled import compiled
from lm.decode.generate import Decoder, Prefilled, Prompt, repeated
from lm.decode.loop import Finish, Limits, extend, out_of_tokens
from lm.decode.request import Completion, Request
from lm.decode.slots import bucket
from lm.decode.strategy import GREEDY
from lm.model.cache import Cache, take_rows
from lm.model.transformer import Transformer


class LengthForm(enum.StrEnum):
    """The penalty of n tokens: GNMT ((5 + n) / 6)^alpha (Wu et al. 2016, arXiv:1609.08144, eq. 14), POWER n^alpha."""

    GNMT = "gnmt"
    POWER = "power"


@dataclasses.dataclass(frozen=True)
class Beams:
    """How many prefixes of an answer are followed, how many answers are given, and how length is weighed.

    `early_stop` ends a row as soon as nothing that is followed can still be among the `best`: it saves time and changes
    no answer.

    Raises:
      UsageError: no beam, more answers than beams, or an alpha that is no number.
    """

    width: int = 4
    best: int = 1
    length_alpha: float = 0.0
    form: LengthForm = LengthForm.GNMT
    early_stop: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UsageError(f"{self.width} beams were asked for", where="beams", do="Ask for at least 1.")
        if not 1 <= self.best <= self.width:
            what = f"the best {self.best} of {self.width} beams were asked for"
            raise UsageError(what, where="best", do="Ask for 1 to as many as there are beams.")
        if not math.isfinite(self.length_alpha):
            raise UsageError(f"{self.length_alpha} is not a finite number", where="length_alpha")

    def penalty(self, length: np.ndarray) -> np.ndarray:
        """What the log-probability of an answer of `length` tokens (at least 1) is divided by."""
        base = (5.0 + length) / 6.0 if self.form is LengthForm.GNMT else 1.0 * length
        return base**self.length_alpha


@dataclasses.dataclass(frozen=True)
class Ranked:
    """An answer and its score; higher is better."""

    completion: Completion
    score: float


class Paths(NamedTuple):
    """N answers or beginnings of answers in each row: tokens, with log-probabilities in nats."""

    token_BNG: jax.Array
    log_prob_BNG: jax.Array


class Search(NamedTuple):
    """Everything about a search under way; a pytree.

    The W beams of B rows are rows of `cache`, those of one row side by side. The `live` paths have `step` tokens each
    and log-probabilities `total_BW`. The K best ended ones are `kept`, ordered by score, -inf where there is none yet.
    """

    cache: Cache
    step: jax.Array
    live: Paths
    total_BW: jax.Array
    kept: Paths
    score_BK: jax.Array
    length_BK: jax.Array
    finish_BK: jax.Array
    done_B: jax.Array


class Rules(NamedTuple):
    """When paths end and what they are worth; `penalty_N` is that of 0 (of 1, since there is none), 1, 2 ... tokens."""

    limits: Limits
    penalty_N: jax.Array
    early_stop: jax.Array


def beam_search(
    decoder: Decoder, prompts: Sequence[Prompt], request: Request, beams: Beams = Beams()
) -> list[list[Ranked]]:
    """The best answers to each prompt, best first; fewer than `beams.best` where there are no more.

    A path ends by an end token that is among the `width` best continuations of its row, or at its limit. Ends of lower
    rank do not count, so that one beam with `length_alpha` 0 is greedy decoding.

    A row stops early once its worst kept score is at least that of every answer that a live path can become. Let a
    live path have n tokens with sum s, and be ended at m tokens, n < m <= M, the limit. Log-probabilities are at most
    0, so its sum is at most s <= 0. Either penalty is positive and monotonic in m (rising for alpha > 0, falling for
    alpha < 0), so over n < m <= M it is at most c = max(penalty(n + 1), penalty(M)), and s / penalty(m) <= s / c since
    s <= 0. Hence no answer of a live path scores above max(s) / c, and one that equals a kept score does not displace
    it. The best answers are therefore those of a search without early stop.

    Raises:
      UsageError: as `Decoder.prefill`; or a request for what a search has not: a constraint, steps of a strategy, stop
        strings, samples.
      RunError: logits that are not numbers.
    """
    for name, wanted in (
        ("constraint", request.constraint),
        ("steps", request.steps != GREEDY),
        ("stops", request.stops),
        ("samples", request.samples > 1),
    ):
        if wanted:
            raise UsageError("beam search takes the likeliest answers as they are", where=name, do="Leave it out.")
    ids = decoder.encode(prompts)
    read = decoder.prefill(ids, request)
    room = bucket(request.max_tokens)
    rules = Rules(
        read.limits._replace(end_E=jnp.unique(read.limits.end_E)),
        jnp.asarray(beams.penalty(np.maximum(np.arange(room + 2), 1)), jnp.float32),
        jnp.asarray(beams.early_stop),
    )
    read = repeated(read, np.repeat(np.arange(len(ids)), beams.width))
    search = _begin(read, rules, room=room, width=beams.width, best=beams.best)
    program = compiled(_advance, several=search.total_BW.size > 1, static=("model",), donated="search")
    return _answers(decoder, program(decoder.model, decoder.params, search, rules))


@partial(jax.jit, static_argnames=("room", "width", "best"))
def _begin(read: Prefilled, rules: Rules, *, room: int, width: int, best: int) -> Search:
    limits = rules.limits
    B, W, K = len(limits.tokens_B), width, best

    def empty(paths: int) -> Paths:
        return Paths(jnp.zeros((B, paths, room), jnp.int32), jnp.zeros((B, paths, room), jnp.float32))

    # The beams of a row are still one and the same: the first alone goes on. Where no token is allowed, the answer
    # of none is kept.
    search = Search(
        cache=read.cache,
        step=jnp.zeros((), jnp.int32),
        live=empty(W),
        total_BW=jnp.full((B, W), -jnp.inf).at[:, 0].set(0.0),
        kept=empty(K),
        score_BK=jnp.full((B, K), -jnp.inf).at[:, 0].set(jnp.where(limits.tokens_B > 0, -jnp.inf, 0.0)),
        length_BK=jnp.zeros((B, K), jnp.int32),
        finish_BK=jnp.broadcast_to(out_of_tokens(limits)[:, None], (B, K)),
        done_B=limits.tokens_B <= 0,
    )
    return _choose(search, read.logits_BV, rules)


def _advance(model: Transformer, params: Any, search: Search, rules: Rules) -> Search:
    def one_token(search: Search) -> Search:
        B, W = search.total_BW.shape
        last_BW1 = jax.lax.dynamic_slice_in_dim(search.live.token_BNG, search.step - 1, 1, axis=2)
        running_N = jnp.repeat(~search.done_B, W).astype(jnp.int32)
        logits_NTV, cache = extend(model, params, last_BW1.reshape(B * W, 1), running_N, search.cache)
        return _choose(search._replace(cache=cache), logits_NTV[:, 0], rules)

    return jax.lax.while_loop(lambda search: ~jnp.all(search.done_B), one_token, search)


def _choose(search: Search, logits_NV: jax.Array, rules: Rules) -> Search:
    """Every live path one token longer: the best that end are kept, the best that do not go on."""
    limits, penalty_N = rules.limits, rules.penalty_N
    (B, W), K = search.total_BW.shape, search.score_BK.shape[1]
    V, E = logits_NV.shape[1], len(limits.end_E)
    log_prob_BWV = jax.nn.log_softmax(logits_NV.reshape(B, W, V), axis=-1)
    total_BWV = search.total_BW[:, :, None] + log_prob_BWV
    # Candidates, best first. A path has at most E ends, so that W others are among W (1 + E).
    total_BC, place_BC = jax.lax.top_k(total_BWV.reshape(B, W * V), W * min(1 + E, V))
    log_prob_BC = jnp.take_along_axis(log_prob_BWV.reshape(B, W * V), place_BC, axis=1)
    parent_BC, token_BC = place_BC // V, (place_BC % V).astype(jnp.int32)
    end_BC = jnp.any(token_BC[:, :, None] == limits.end_E[None, None], axis=2)
    step = search.step + 1
    out_B = step >= limits.tokens_B

    def longer(candidate_BN: jax.Array) -> Paths:
        """The live paths that these candidates come from, with their tokens."""
        parent_BN1 = jnp.take_along_axis(parent_BC, candidate_BN, axis=1)[:, :, None]
        here_11G = (jnp.arange(search.live.token_BNG.shape[2]) == search.step)[None, None]

        def one(path_BWG: jax.Array, value_BC: jax.Array) -> jax.Array:
            value_BN1 = jnp.take_along_axis(value_BC, candidate_BN, axis=1)[:, :, None]
            return jnp.where(here_11G, value_BN1, jnp.take_along_axis(path_BWG, parent_BN1, axis=1))

        return Paths(one(search.live.token_BNG, token_BC), one(search.live.log_prob_BNG, log_prob_BC))

    first_BW = jnp.broadcast_to(jnp.arange(W)[None], (B, W))
    ends_BW = (end_BC[:, :W] | out_B[:, None]) & ~search.done_B[:, None]
    score_BW = jnp.where(ends_BW, total_BC[:, :W] / penalty_N[step], -jnp.inf)
    reason_BW = jnp.where(end_BC[:, :W], Finish.END, out_of_tokens(limits)[:, None])
    score_BK, best_BK = jax.lax.top_k(jnp.concatenate([search.score_BK, score_BW], axis=1), K)

    def keep(old: jax.Array, new: jax.Array) -> jax.Array:
        both = jnp.concatenate([old, new], axis=1)
        return jnp.take_along_axis(both, best_BK.reshape(B, K, *(1,) * (both.ndim - 2)), axis=1)

    total_BW, live_BW = jax.lax.top_k(jnp.where(end_BC, -jnp.inf, total_BC), W)
    row_B1 = jnp.arange(B)[:, None] * W
    # No answer of a live path scores above this: see `beam_search`.
    bound_B = total_BW[:, 0] / jnp.maximum(penalty_N[step + 1], penalty_N[limits.tokens_B])
    settled_B = rules.early_stop & (score_BK[:, -1] >= bound_B)
    return Search(
        cache=take_rows(search.cache, (row_B1 + jnp.take_along_axis(parent_BC, live_BW, axis=1)).reshape(B * W)),
        step=step,
        live=longer(live_BW),
        total_BW=total_BW,
        kept=jax.tree.map(keep, search.kept, longer(first_BW)),
        score_BK=score_BK,
        length_BK=keep(search.length_BK, jnp.full((B, W), step)),
        finish_BK=keep(search.finish_BK, reason_BW),
        done_B=search.done_B | out_B | settled_B,
    )


def _answers(decoder: Decoder, search: Search) -> list[list[Ranked]]:
    if bool(jnp.any(jnp.isnan(search.total_BW)) | jnp.any(jnp.isnan(search.score_BK))):
        what = "the logits of a beam are not numbers"
        raise RunError(what, do="The parameters are not usable: take an earlier checkpoint.")
    arrays = (search.kept.token_BNG, search.kept.log_prob_BNG, search.length_BK, search.finish_BK, search.score_BK)
    return [
        [
            Ranked(
                Completion(
                    tokens[:length],
                    log_probs[:length],
                    log_probs[:length],
                    decoder.tokenizer.decode(tokens[:length]),
                    Finish(int(finish)),
                ),
                float(score),
            )
            for tokens, log_probs, length, finish, score in zip(*row, strict=True)
            if score > -np.inf
        ]
        for row in zip(*jax.device_get(arrays), strict=True)
    ]
