"""Counting models: the next token by how often n-grams were seen, smoothed; order 0 is uniform, 1 unigram, 2 bigram.

An n-gram of k tokens is known by its place in the sorted table of level k. Its code there is (place of its first k - 1
tokens in level k - 1) V + its last token: 64-bit integers hold any order and vocabulary, and whatever follows a context
stands side by side. The empty context is place 0 of a level 0 that is not kept, and level 1 has every token.

Letters beside those of `lm.model.config`: W windows, N n-grams of a level, P places of the level below (contexts).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.base.errors import UsageError

FALLBACK = (0.5, 1.0, 1.5)  # discounts where counts of counts give none
_NOWHERE = -1  # the place of what was never seen, or reaches before the window; indexes the end of what is looked up


def describes_counting(model: Any) -> bool:
    """Whether plain values are those of a `Counting`: no other model has an `order`."""
    return isinstance(model, Mapping) and "order" in model


@dataclasses.dataclass(frozen=True)
class Counting:
    """A model that predicts a token from the `order` - 1 before it, by counts alone.

    p_k(w | h) = share(h w) + backoff(h) p_{k-1}(w | h without its first token), down to p_0 = 1 / V. Without a
    `pseudocount` that is interpolated modified Kneser-Ney (Chen and Goodman 1998, TR-10-98, section 3): below the
    highest order, the count of an n-gram is the number of tokens that it was seen behind. With one, `pseudocount` V
    more tokens are counted behind each context, shared out as the order below says (MacKay and Peto 1995; at order 1
    Lidstone's rule); 0 leaves relative frequencies, by which what never followed a seen context has probability 0.

    Raises:
      UsageError: a number out of its range, or two that contradict one another.
    """

    vocab_size: int
    context_length: int  # of the windows that are counted and scored: no n-gram reaches beyond one
    order: int
    pseudocount: float | None = None

    def __post_init__(self) -> None:
        least = {"vocab_size": 1, "context_length": 1, "order": 0, "pseudocount": 0}
        for name, value in ((name, getattr(self, name)) for name in least):
            if value is not None and value < least[name]:
                raise UsageError(f"{name} is {value}; it must be at least {least[name]}", where="config.model")
        if self.order > self.context_length + 1:
            raise UsageError(f"order {self.order} looks back over more than context_length {self.context_length}",
                             where="config.model", do="Change one of them.")  # fmt: skip
        if self.order == 0 and self.pseudocount is not None:
            raise UsageError("order is 0, which counts nothing, and pseudocount is given", where="config.model",
                             do="Change one of them.")  # fmt: skip

    @property
    def predicted_length(self) -> int:
        """Positions of a window that predict, as of `ModelConfig`: all."""
        return self.context_length

    @property
    def lead(self) -> int:
        """Tokens of a window before the first of them: none."""
        return 0

    @property
    def processed_length(self) -> int:
        """Positions of a window that are read."""
        return self.context_length


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """The n-grams of one length: `code_N` (int64, ascending) and `count_N` (int64), from which the rest follows.

    `share_N` and `backoff_P` (float64) have one more entry at their end, for `_NOWHERE`: share 0, backoff 1.
    """

    code_N: np.ndarray
    count_N: np.ndarray
    share_N: np.ndarray
    backoff_P: np.ndarray

    def find(self, code: np.ndarray) -> np.ndarray:
        """The places of codes, of any shape."""
        if not len(self.code_N):
            return np.full(np.shape(code), _NOWHERE)
        at = np.minimum(np.searchsorted(self.code_N, code), len(self.code_N) - 1)
        return np.where(self.code_N[at] == code, at, _NOWHERE)


@dataclasses.dataclass(frozen=True, eq=False)
class Counts:
    """What was counted: tables of codes and counts by level, as they are stored; `levels` follow from them."""

    config: Counting
    tables: tuple[tuple[np.ndarray, np.ndarray], ...]

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """What predictions are made of, a level an order."""
        contexts = [1, *(len(code_N) for code_N, _ in self.tables)]
        return tuple(
            _level(self.config, code_N, count_N, number)
            for number, (code_N, count_N) in zip(contexts, self.tables, strict=False)
        )

    @property
    def stored(self) -> int:
        """How many counts there are: what this model has in place of parameters."""
        return sum(len(count_N) for _, count_N in self.tables)

    def log_probs(
        self, inputs_BT: np.ndarray, targets_BT: np.ndarray, segments_BT: np.ndarray | None = None
    ) -> np.ndarray:
        """log p(target) in nats, float64 [B, T]; targets are the inputs one place further.

        Contexts begin with the row and, with `segments_BT`, with the document.
        """
        prob_BT = np.full(targets_BT.shape, 1 / self.config.vocab_size)
        context_BT = np.zeros(targets_BT.shape, np.int64)
        for k, level in enumerate(self.levels, start=1):
            gram_BT = level.find(context_BT * self.config.vocab_size + targets_BT)
            prob_BT = level.share_N[gram_BT] + level.backoff_P[context_BT] * prob_BT
            context_BT = _longer(k, gram_BT, inputs_BT, segments_BT)
        with np.errstate(divide="ignore"):
            return np.log(prob_BT)

    def distribution(self, context: Sequence[int] | np.ndarray) -> np.ndarray:
        """p(token | context), float64 [V], of which the last `order` - 1 tokens count (fewer where there are fewer)."""
        V = self.config.vocab_size
        prob_V = np.full(V, 1 / V)
        for k, level in enumerate(self.levels[: len(context) + 1]):
            place = self._place(context[len(context) - k :])
            if place == _NOWHERE:
                break  # longer ones were never seen either
            first, last = np.searchsorted(level.code_N, (place * V, (place + 1) * V))
            prob_V *= level.backoff_P[place]
            prob_V[level.code_N[first:last] - place * V] += level.share_N[first:last]
        return prob_V

    def _place(self, tokens: Sequence[int] | np.ndarray) -> int:
        place = 0
        for level, token in zip(self.levels, tokens, strict=False):
            place = int(level.find(np.array(place * self.config.vocab_size + int(token))))
            if place == _NOWHERE:
                break
        return place


def count(
    config: Counting, inputs_WT: np.ndarray, targets_WT: np.ndarray, segments_WT: np.ndarray | None = None
) -> Counts:
    """Counts every target behind each context of up to `order` - 1 tokens that lies in its window and document.

    Args:
      config: the model.
      inputs_WT: token ids.
      targets_WT: the same one place further.
      segments_WT: document ids, ascending along T; without them a window is one document.
    """
    V = config.vocab_size
    context_WT = np.zeros(targets_WT.shape, np.int64)
    below_WT = context_WT  # places of the n-grams that end in the same target and are a token shorter
    tables: list[tuple[np.ndarray, np.ndarray]] = []
    for k in range(1, config.order + 1):
        gram_WT = np.full(targets_WT.shape, _NOWHERE, np.int64)
        if k == 1:
            gram_WT[:] = targets_WT
            tables.append((np.arange(V), np.bincount(targets_WT.ravel(), minlength=V)))
        else:
            there_WT = context_WT != _NOWHERE
            code_N, first_N, gram_WT[there_WT], count_N = np.unique(
                (context_WT * V + targets_WT)[there_WT], return_index=True, return_inverse=True, return_counts=True
            )
            if config.pseudocount is None:
                shorter_N, _ = tables[-1]
                tables[-1] = shorter_N, np.bincount(below_WT[there_WT][first_N], minlength=len(shorter_N))
            tables.append((code_N, count_N))
        context_WT, below_WT = _longer(k, gram_WT, inputs_WT, segments_WT), gram_WT
    return Counts(config, tuple(tables))


def discounts(count_N: np.ndarray) -> np.ndarray:
    """What Kneser-Ney takes off counts of 0, 1, 2, and 3 or more (Chen and Goodman 1998, equation 26), float64 [4].

    With n_c n-grams of count c and Y = n1 / (n1 + 2 n2), D_c = c - (c + 1) Y n_{c+1} / n_c. Where one of n1 to n4 is 0
    or a discount is not positive, as with few tokens seen often, they are `FALLBACK`.
    """
    n = np.bincount(np.minimum(count_N, 5), minlength=6)[1:5].astype(np.float64)
    found = np.array(FALLBACK)
    if n.all():
        c = np.arange(1, 4)
        estimated = c - (c + 1) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:-1]
        found = estimated if (estimated > 0).all() else found
    return np.concatenate([[0.0], found])


def _level(config: Counting, code_N: np.ndarray, count_N: np.ndarray, contexts: int) -> Level:
    """The level with what its counts give each n-gram and leave to the order below, for so many contexts."""
    context_N = code_N // config.vocab_size
    total_P = np.bincount(context_N, weights=count_N, minlength=contexts)
    if config.pseudocount is None:
        less_N = discounts(count_N)[np.minimum(count_N, 3)]
        left_P = np.bincount(context_N, weights=less_N, minlength=contexts)
    else:
        less_N = np.zeros(len(count_N))
        left_P = np.full(contexts, config.pseudocount * config.vocab_size)
        total_P = total_P + left_P
    seen_P = total_P > 0
    total_P = np.where(seen_P, total_P, 1.0)
    return Level(
        code_N,
        count_N,
        share_N=np.append((count_N - less_N) / total_P[context_N], 0.0),
        backoff_P=np.append(np.where(seen_P, left_P / total_P, 1.0), 1.0),
    )


def _longer(k: int, gram_WT: np.ndarray, inputs_WT: np.ndarray, segments_WT: np.ndarray | None) -> np.ndarray:
    """The places of contexts of k tokens, from those of n-grams of k: what ended in the target before this input."""
    if k == 1:
        return inputs_WT.astype(np.int64)
    context_WT = np.full(gram_WT.shape, _NOWHERE, np.int64)
    context_WT[:, 1:] = gram_WT[:, :-1]
    if segments_WT is not None:
        context_WT[:, 1:][segments_WT[:, 1:] != segments_WT[:, :-1]] = _NOWHERE
    return context_WT
