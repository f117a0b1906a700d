"""What is asked of the decoder, and what it answers."""

import dataclasses
import enum

import numpy as np

from lm.base.errors import UsageError
from lm.decode.constrain import Constraint
from lm.decode.loop import Finish
from lm.decode.strategy import GREEDY, Strategy

MAX_TOKENS = 128  # of an answer, unless something else is asked for


class Full(enum.StrEnum):
    """What happens to a prompt and answer that would not fit the context: refused, or cut off with a reason.

    With SHORTER an answer is cut off, but a prompt that leaves no room for a single token is refused.
    """

    ERROR = "error"
    SHORTER = "shorter"
    STOP = "stop"


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer: ids with log-probabilities in nats under the model and under the strategy, bytes, and why it ended.

    `tokens` hold the end token where there was one; `text` ends before a stop string.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    strategy_log_probs: np.ndarray
    text: bytes
    finish: Finish


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for: how many tokens, how they are chosen, and what else ends an answer.

    `end_ids` None: the tokenizer's end of text. `stops` are byte strings. `samples` answers are given to each prompt,
    one after the other, each with a key of its own; the prompt is read once. With a `constraint` every answer matches
    it whole, cut off or not: near the limit only what can still be completed is allowed.

    Raises:
      UsageError: a seed outside [0, 2^32), an empty stop string, a negative end id, or a constraint with stop strings.
    """

    max_tokens: int = MAX_TOKENS
    steps: Strategy = GREEDY
    seed: int = 0
    end_ids: tuple[int, ...] | None = None
    stops: tuple[bytes, ...] = ()
    full: Full = Full.ERROR
    samples: int = 1
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; it lies in 0 to 2**32 - 1", where="seed")
        if b"" in self.stops:
            raise UsageError("a stop string is empty: it would end every answer", where="stops")
        if self.constraint and self.stops:
            raise UsageError("a stop string would cut an answer that is held to a constraint", where="stops")
        if min(self.end_ids or (0,)) < 0:
            raise UsageError(f"there is no token {min(self.end_ids or ())}", where="end_ids")
