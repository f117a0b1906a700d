"""One answer out of several to the same prompt: the likeliest, or the one that most of them agree on.

The answers come from `generate` (or `speculate`) with `Request.samples` above 1: the prompt is read once and its cache
is copied for each.
"""

import collections
import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from lm.base.errors import UsageError
from lm.decode.request import Completion


class By(enum.StrEnum):
    """What the best answer has the most of: raw log-probability of the whole, or on average of its tokens."""

    TOTAL = "total"
    MEAN = "mean"

    def score(self, answer: Completion) -> float:
        """Nats under the model, before the strategy; -inf for an answer without tokens."""
        if len(answer.log_probs) == 0:
            return -np.inf
        nats = answer.log_probs.astype(np.float64)
        return float(nats.mean() if self is By.MEAN else nats.sum())


@dataclasses.dataclass(frozen=True)
class Vote:
    """The value that most answers have (None where none has one), its likeliest answer, and the votes for each."""

    value: Hashable
    answer: Completion
    votes: dict[Hashable, int]


def by_prompt(answers: Sequence[Completion], samples: int) -> list[list[Completion]]:
    """The answers to each prompt, `samples` of them."""
    return [list(answers[first : first + samples]) for first in range(0, len(answers), samples)]


def best_of(answers: Sequence[Completion], by: By = By.MEAN) -> Completion:
    """The likeliest of the answers to one prompt, the first of equal ones.

    TOTAL is kind to short answers, MEAN to repetitive ones.

    Raises:
      UsageError: no answer.
    """
    if not answers:
        raise UsageError("there is no answer to choose from", where="answers")
    return max(answers, key=by.score)


def majority_vote(answers: Sequence[Completion], extract: Callable[[Completion], Hashable | None]) -> Vote:
    """The value that most answers to one prompt have (self-consistency, Wang et al. 2022, arXiv:2203.11171).

    `extract` finds the value of an answer; one for which it is None has no vote. Of values with as many votes the one
    with the larger total probability wins: that of its different answers together, each counted once.

    Raises:
      UsageError: no answer.
    """
    likeliest = best_of(answers, By.TOTAL)
    found: dict[Hashable, list[Completion]] = collections.defaultdict(list)
    for answer in answers:
        if (value := extract(answer)) is not None:
            found[value].append(answer)
    if not found:
        return Vote(None, likeliest, {})

    def strength(value: Hashable) -> tuple[int, float]:
        different = {tuple(answer.tokens.tolist()): By.TOTAL.score(answer) for answer in found[value]}
        return len(found[value]), float(np.logaddexp.reduce(list(different.values())))

    winner = max(found, key=strength)
    return Vote(winner, best_of(found[winner], By.TOTAL), {value: len(having) for value, having in found.items()})
