"""From a fit to the next run: predicted losses with two kinds of interval, and how far they reach past the data."""

import dataclasses

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.laws import law_named
from lm.scaling.result import FitResult

LEVEL = 0.95
NOISE_GRID = 400
ENOUGH = 20  # resamples: among fewer the estimate may well be the outermost
ROUNDING = 1e-9
# The warnings of a fit that bear on what it predicts.
CARRIED_OVER = ("THE FIT", "E not", "of the resamples", "one compute budget")


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """How many times past the largest (or below the smallest) fitted value a point lies; 1 inside the range."""

    n: float
    d: float
    c: float
    u: float = 1.0

    @property
    def worst(self) -> float:
        return max(self.n, self.d, self.c, self.u)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each quantity that lies outside."""
        return tuple(
            f"{name} lies {ratio:.3g} times outside the fitted range"
            for name, ratio in dataclasses.asdict(self).items()
            if ratio > 1
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted loss in nats/token (or `setting`, in its unit) at `n` parameters and `d` tokens, `u` distinct.

    `mean_interval` is where the law may lie, `prediction_interval` where one new run may: it adds the residual noise of
    the fitted runs, or the seed noise of repeated ones where that is larger. Both are 95 %.
    """

    n: float
    d: float
    u: float
    mean: float
    mean_interval: tuple[float, float]
    prediction_interval: tuple[float, float]
    extrapolation: Extrapolation
    warnings: tuple[str, ...]
    setting: str | None = None


def predict(result: FitResult, n: float, d: float, u: float | None = None) -> Prediction:
    """Predicts one run; `u` of its `d` tokens are distinct (None: all, nothing is repeated).

    Raises:
      UsageError: `n`, `d`, `u` or their FLOP is not a positive number, `u` is over `d` or not read by the law, or the
        fit has no bootstrap to make intervals from.
    """
    law = law_named(result.law)
    if u is not None and "u" not in law.variables:
        raise UsageError(f"'{law.name}' does not read distinct tokens", where="--u", do="Fit --law repeated.")
    u = d if u is None else u
    c = float(result.provenance["flops_per_nd"]) * n * d
    for name, value in (("n", n), ("d", d), ("c", c), ("u", u)):
        if not 0 < value < np.inf:
            raise UsageError(f"{name}={value:g} is not a positive number")
    if u > d:
        raise UsageError(f"{u:g} distinct tokens among {d:g}", where="--u", do="u counts each token once: u <= d.")
    if not result.bootstrap_samples:
        raise UsageError("the fit has no bootstrap samples", do="Fit with --bootstrap 1000.")
    from scipy.special import stdtrit

    at = {"n": np.array([n]), "d": np.array([d]), "c": np.array([c]), "u": np.array([u])}
    with np.errstate(over="ignore"):
        mean = float(law.predict(result.estimate, at)[0])
        log_means = np.log(law.predict(result.samples, at)[:, 0])
    if not np.isfinite([mean, *log_means]).all():
        raise UsageError(f"no finite loss at n={n:g} and d={d:g}", where="--n, --d", do="Give larger ones.")
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    noise = max(_number(result.noise["residual_sd"]), _number(result.noise["seed_sd"]))
    grid = stdtrit(_number(result.noise["freedom"]), (np.arange(NOISE_GRID) + 0.5) / NOISE_GRID)
    low, high = np.exp(np.quantile(log_means, levels))
    far_low, far_high = np.exp(np.quantile((log_means[:, None] + noise * grid[None]).ravel(), levels))
    reach = extrapolation(result, n, d, u if "u" in law.variables else None)
    warnings = (*carried_over(result), *reach.warnings)
    return Prediction(
        float(n),
        float(d),
        float(u),
        mean,
        (float(low), float(high)),
        (float(far_low), float(far_high)),
        reach,
        warnings,
        result.provenance["columns"].get("optimum_of"),
    )


def extrapolation(result: FitResult, n: float, d: float, u: float | None = None) -> Extrapolation:
    """How far a run of `n` parameters on `d` tokens (`u` distinct, for laws that read them) lies from those fitted."""
    values = {"n": n, "d": d, "c": float(result.provenance["flops_per_nd"]) * n * d}
    values |= {} if u is None else {"u": u}
    return Extrapolation(**{name: _reach(value, result.fitted_range[name]) for name, value in values.items()})


def carried_over(result: FitResult) -> tuple[str, ...]:
    """The warnings of a fit that bear on what it predicts, a failed certificate first; then what its samples show."""
    said = [warning for warning in result.warnings if any(words in warning for words in CARRIED_OVER)]
    if len(result.bootstrap_samples) >= ENOUGH:
        low, high = result.samples.min(0), result.samples.max(0)
        # Estimates lie within their resamples; those of a pinned parameter are equal but for rounding.
        outside = (result.estimate < low * (1 - ROUNDING)) | (result.estimate > high * (1 + ROUNDING))
        names = ", ".join(name for name, out in zip(result.parameters, outside, strict=True) if out)
        if names:
            said.append(f"THE BOOTSTRAP SAMPLES ARE ANOTHER FIT'S, and so the intervals: outside of them lies {names}")
    return tuple(said)


def _number(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _reach(value: float, fitted: list[float]) -> float:
    return max(1.0, value / fitted[1], fitted[0] / value)
