"""What a fit minimises: a sum over points of a function of the residual, always named in the output."""

import dataclasses
import math

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sum over points of Huber(delta) of log(observed) - log(predicted).

    delta = inf is least squares, delta = 0 least absolute deviations (solved as the limit of small deltas). `value` is
    in the objective's own units: r^2 / 2 within delta, delta (|r| - delta / 2) beyond; |r| at 0. `over` multiplies the
    points that are predicted too high: above 1 the fit leans to the best achieved losses. `logarithm` False takes
    observed - predicted instead, in nats.
    """

    name: str
    delta: float
    over: float = 1.0
    logarithm: bool = True

    @property
    def stages(self) -> tuple[float, ...]:
        """The deltas that are solved one after the other, each from the answer of the one before."""
        return (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10) if self.delta == 0 else (self.delta,)

    @property
    def approach(self) -> tuple[float, ...]:
        """Wider deltas to pass through on the way from a far start, where nearly all points lie beyond delta."""
        return () if math.isinf(self.delta) else (100 * self.stages[0], 10 * self.stages[0])

    @property
    def scale(self) -> float:
        """What the objective is multiplied by while it is solved: 1 / delta^2, or 1."""
        return 1.0 if self.delta in (0, math.inf) else 1 / self.delta**2

    def value(self, residuals: Array, weights: Array | None = None) -> Array:
        """The objective [...] of residuals [..., points], weighted by counts where given."""
        size = np.abs(residuals)
        if self.delta == 0:
            rho = size
        elif math.isinf(self.delta):
            rho = 0.5 * size**2
        else:
            rho = np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))
        rho = rho * self.sided(residuals)
        return (rho if weights is None else rho * weights).sum(-1)

    def sided(self, residuals: Array) -> Array:
        """What each point counts by the side it lies on: `over` where it is predicted too high, else 1."""
        return np.where(residuals < 0, self.over, 1.0)


HUBER = Objective("huber_log", 1e-3)
ASYMMETRIC = Objective("log_asymmetric", 0.0, over=10.0)
LINEAR_ASYMMETRIC = Objective("asymmetric", 0.0, over=10.0, logarithm=False)
OBJECTIVES: tuple[Objective, ...] = (
    HUBER,
    Objective("log_least_squares", math.inf),
    Objective("log_absolute", 0.0),
    ASYMMETRIC,
    Objective("least_squares", math.inf, logarithm=False),
    LINEAR_ASYMMETRIC,
)
NUMBERED = {
    HUBER.name: "delta",
    ASYMMETRIC.name: "over",
    LINEAR_ASYMMETRIC.name: "over",
}  # what the number after a colon sets


def objective_named(name: str) -> Objective:
    """The objective of that name; `huber_log:DELTA`, `log_asymmetric:OVER` and `asymmetric:OVER` set their number.

    Raises:
      UsageError: no such objective, or a number that is not positive (for OVER: below 1).
    """
    base, colon, number = name.partition(":")
    known = {objective.name: objective for objective in OBJECTIVES}
    if base not in known:
        raise UsageError(f"there is no objective '{base}'", where="--objective", do=nearest(base, list(known)))
    if not colon:
        return known[base]
    if base not in NUMBERED:
        raise UsageError(f"'{base}' takes no number", where="--objective", do=f"Write {base}.")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    least = 1.0 if NUMBERED[base] == "over" else 0.0
    if not (least < value < math.inf or value == least == 1.0):
        what = f"'{number}' is not a positive {NUMBERED[base]}" if not least else f"'{number}' is not 1 or more"
        raise UsageError(what, where="--objective", do=f"Write {HUBER.name}:1e-3 or {ASYMMETRIC.name}:10.")
    return dataclasses.replace(HUBER, delta=value) if not least else dataclasses.replace(known[base], over=value)
