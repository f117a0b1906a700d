"""From a fit to the next run: predicted losses with two kinds of interval, and how far they reach past the data."""

import dataclasses

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.laws import law_named
from lm.scaling.result import FitResult

LEVEL = 0.95
NOISE_GRID = 400
CARRIED_OVER = ("THE FIT", "E not", "of the resamples")  # a fit's warnings that bear on what it predicts


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """How many times past the largest (or below the smallest) fitted value a point lies; 1 inside the range."""

    n: float
    d: float
    c: float

    @property
    def worst(self) -> float:
        return max(self.n, self.d, self.c)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted loss in nats/token at `n` parameters and `d` tokens.

    `mean_interval` is where the law may lie, `prediction_interval` where one new run may: it adds the residual noise of
    the fitted runs, or the seed noise of repeated ones where that is larger. Both are 95 %.
    """

    n: float
    d: float
    mean: float
    mean_interval: tuple[float, float]
    prediction_interval: tuple[float, float]
    extrapolation: Extrapolation
    warnings: tuple[str, ...]


def predict(result: FitResult, n: float, d: float) -> Prediction:
    """Predicts one run.

    Raises:
      UsageError: `n`, `d` or their FLOP is not a positive number, or the fit has no bootstrap to make intervals from.
    """
    c = float(result.provenance["flops_per_nd"]) * n * d
    for name, value in (("n", n), ("d", d), ("c", c)):
        if not 0 < value < np.inf:
            raise UsageError(f"{name}={value:g} is not a positive number")
    if not result.bootstrap_samples:
        raise UsageError("the fit has no bootstrap samples", do="Fit with --bootstrap 1000.")
    from scipy.special import stdtrit

    law = law_named(result.law)
    at = {"n": np.array([n]), "d": np.array([d]), "c": np.array([c])}
    mean = float(law.predict(np.array(list(result.parameters.values())), at)[0])
    log_means = np.log(law.predict(result.samples, at)[:, 0])
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    noise = max(_number(result.noise["residual_sd"]), _number(result.noise["seed_sd"]))
    grid = stdtrit(_number(result.noise["freedom"]), (np.arange(NOISE_GRID) + 0.5) / NOISE_GRID)
    low, high = np.exp(np.quantile(log_means, levels))
    far_low, far_high = np.exp(np.quantile((log_means[:, None] + noise * grid[None]).ravel(), levels))
    reach = Extrapolation(*(_reach(value, result.fitted_range[name]) for name, value in (("n", n), ("d", d), ("c", c))))
    warnings = [
        f"{name} lies {ratio:.3g} times outside the fitted range"
        for name, ratio in (("n", reach.n), ("d", reach.d), ("c", reach.c))
        if ratio > 1
    ]
    warnings = [warning for warning in result.warnings if any(words in warning for words in CARRIED_OVER)] + warnings
    return Prediction(
        float(n), float(d), mean, (float(low), float(high)), (float(far_low), float(far_high)), reach, tuple(warnings)
    )


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _reach(value: float, fitted: list[float]) -> float:
    return max(1.0, value / fitted[1], fitted[0] / value)
