"""Resamples of a fit and the intervals that come of them: by point, by cluster, by residual; percentile and BCa."""

import dataclasses
import enum

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.fitting.solve import Array, Problem, Solution, minimise

LEVEL = 0.95
JACKKNIFE_GROUPS = 200
COUNTS_AT_ONCE = 25_000_000  # of resamples x points
FEWEST_RESAMPLES = 20  # below, not even a 90 % interval has a resample beyond each end


class Resampling(enum.Enum):
    """What is drawn with replacement."""

    POINT = "point"
    CLUSTER = "cluster"
    RESIDUAL = "residual"


class Interval(enum.Enum):
    """How resamples become an interval."""

    PERCENTILE = "percentile"
    BCA = "bca"


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """How many resamples of what kind; `clusters` are integer codes [points], needed for CLUSTER."""

    resamples: int
    kind: Resampling
    seed: int
    clusters: Array | None = None

    def __post_init__(self) -> None:
        if self.resamples < 0 or 0 < self.resamples < FEWEST_RESAMPLES:
            raise UsageError(
                f"{self.resamples} resamples give no interval",
                where="--bootstrap",
                do=f"Give 0 (no intervals) or at least {FEWEST_RESAMPLES}.",
            )
        if self.seed < 0:
            raise UsageError(f"a seed of {self.seed}", where="--seed", do="Give 0 or more.")


def draw(problem: Problem, answer: Array, spec: Bootstrap) -> Solution:
    """Refits every resample from the answer [P]: as many at once as keep their counts within 200 MB."""
    random = np.random.default_rng(spec.seed)
    step = max(1, COUNTS_AT_ONCE // problem.log_loss.shape[-1])
    parts = []
    for begin in range(0, spec.resamples, step):
        rows = min(step, spec.resamples - begin)
        resampled = _resampled(problem, answer, spec, random, rows)
        parts.append(minimise(resampled, np.repeat(answer[None], rows, 0)))
    return Solution.joined(parts)


def _resampled(problem: Problem, answer: Array, spec: Bootstrap, random: np.random.Generator, rows: int) -> Problem:
    points = problem.log_loss.shape[-1]
    if spec.kind is Resampling.RESIDUAL:
        predicted = problem.law.log_loss(answer, problem.logs)
        residual = problem.log_loss - predicted
        # As many as there are parameters are about 0, since the fit runs through those points: drawn again, they make
        # the next fit too sure. Leaving them out also raises the variance by n / (n - p), as least squares needs.
        residual = residual[np.argsort(np.abs(residual))[int(problem.free.sum()) :]]
        residual = residual - residual.mean()
        return dataclasses.replace(problem, log_loss=predicted + random.choice(residual, (rows, points)))
    codes = np.arange(points) if spec.clusters is None else spec.clusters
    groups = int(codes.max()) + 1
    drawn = random.integers(groups, size=(rows, groups)) + groups * np.arange(rows)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=rows * groups).reshape(rows, groups)
    return dataclasses.replace(problem, weights=counts.astype(np.float64)[:, codes])


def jackknife(problem: Problem, answer: Array, spec: Bootstrap) -> Array:
    """Answers [groups, P] with one point (or cluster, or one of at most 200 groups) left out, for BCa."""
    points = problem.log_loss.shape[-1]
    codes = np.arange(points) if spec.clusters is None else spec.clusters
    groups = min(int(codes.max()) + 1, JACKKNIFE_GROUPS)
    weights = (codes[None] % groups != np.arange(groups)[:, None]).astype(np.float64)
    return minimise(dataclasses.replace(problem, weights=weights), np.repeat(answer[None], groups, 0)).theta


def interval(
    samples: Array, estimate: float, left_out: Array | None, kind: Interval, level: float = LEVEL
) -> tuple[float, float]:
    """The two-sided interval of a scalar from its resampled values [R] (for BCa also its jackknife values [groups])."""
    low, high = (1 - level) / 2, (1 + level) / 2
    if kind is Interval.BCA and left_out is not None:
        low, high = _bca_levels(samples, estimate, left_out, (low, high))
    found = np.quantile(samples, [low, high])
    return float(found[0]), float(found[1])


def _bca_levels(samples: Array, estimate: float, left_out: Array, levels: tuple[float, float]) -> tuple[float, float]:
    """Bias-corrected and accelerated levels (Efron 1987)."""
    from scipy.special import ndtr, ndtri

    below = np.mean(samples < estimate) + 0.5 * np.mean(samples == estimate)
    bias = ndtri(np.clip(below, 1 / (len(samples) + 1), len(samples) / (len(samples) + 1)))
    deviation = left_out.mean() - left_out
    spread = np.sum(deviation**2) ** 1.5
    acceleration = np.sum(deviation**3) / (6 * spread) if spread > 0 else 0.0
    z = bias + ndtri(np.array(levels))
    adjusted = ndtr(bias + z / (1 - acceleration * z))
    return float(adjusted[0]), float(adjusted[1])
