"""The numbers of a strategy, checked in one place for the command and for Python."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from lm.base.errors import UsageError
from lm.decode.strategy import (
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Step,
    Strategy,
    Temperature,
    TopK,
    TopP,
)

DEFAULT_ORDER = ("repetition", "presence", "bias", "temperature", "top-k", "top-p", "min-p")
"""Names of the steps in the order of Hugging Face: penalties, bias, temperature, then what cuts the tail."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How tokens are chosen. Every default is neutral: together they sample from the model as it is.

    `temperature` 0 is greedy. `logit_bias` maps token ids to what is added to their logits. `order` says which step
    follows which; it has to name every one that is not neutral. The same numbers keep other tokens in another order.

    Raises:
      UsageError: a number that is not finite or outside its range, or an order with an unknown step, one twice, or
        without one that is needed.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    order: Sequence[str] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name, allowed, told in (
            ("temperature", self.temperature >= 0, "it must be at least 0; 0 is greedy"),
            ("top_k", self.top_k >= 0 and float(self.top_k).is_integer(), "it is a count; 0 keeps all"),
            ("top_p", 0 <= self.top_p <= 1, "it lies in 0 to 1; 1 keeps all"),
            ("min_p", 0 <= self.min_p <= 1, "it lies in 0 to 1; 0 keeps all"),
            ("repetition_penalty", self.repetition_penalty > 0, "it must be above 0; 1 changes nothing"),
            ("presence_penalty", True, "it must be finite"),
            ("frequency_penalty", True, "it must be finite"),
        ):
            if not (math.isfinite(getattr(self, name)) and allowed):
                raise UsageError(f"{name} is {getattr(self, name)}: {told}", where="settings")
        for name in self.order:
            if name not in DEFAULT_ORDER:
                raise UsageError(f"there is no step '{name}'", where="order", do=f"Known: {', '.join(DEFAULT_ORDER)}.")
        for name in self._needed():
            if list(self.order).count(name) != 1:
                what = f"'{name}' changes something and is named {list(self.order).count(name)} times"
                raise UsageError(what, where="order", do="Name it once.")

    def _needed(self) -> list[str]:
        neutral = {
            "repetition": self.repetition_penalty == 1,
            "presence": self.presence_penalty == self.frequency_penalty == 0,
            "bias": not self.logit_bias,
            "temperature": self.temperature == 1,
            "top-k": self.top_k == 0,
            "top-p": self.top_p == 1,
            "min-p": self.min_p == 0,
        }
        return [name for name in DEFAULT_ORDER if not neutral[name]]

    def steps(self, vocab_size: int) -> Strategy:
        """The strategy; penalties and biases that change nothing are left out (they would cost memory).

        What cuts the tail is always there, so that other numbers are the same program.

        Raises:
          UsageError: a bias for an id outside the vocabulary, +inf or NaN, or -inf for all of them.
        """
        # What cuts the tail never cuts the likeliest, so that beside greedy it would only cost time.
        k, p, min_p = (0, 1.0, 0.0) if self.temperature == 0 else (self.top_k, self.top_p, self.min_p)
        made: dict[str, Step] = {
            "temperature": Temperature(float(self.temperature)),
            "top-k": TopK(min(int(k), vocab_size)),
            "top-p": TopP(float(p)),
            "min-p": MinP(float(min_p)),
        }
        needed = self._needed()
        if "repetition" in needed:
            made["repetition"] = RepetitionPenalty(float(self.repetition_penalty))
        if "presence" in needed:
            made["presence"] = PresencePenalty(float(self.presence_penalty), float(self.frequency_penalty))
        if "bias" in needed:
            made["bias"] = LogitBias.of(self.logit_bias, vocab_size)
        order = [*self.order, *(name for name in DEFAULT_ORDER if name not in self.order)]
        return tuple(made[name] for name in order if name in made)
