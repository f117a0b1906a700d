"""Which runs to train next: those expected to narrow the interval of log N* most within a total cost.

A c-optimal design from the fit's own resamples: over them, log N* and the log losses that candidate runs would show
vary together, and conditioning the one on the others with the fit's noise is the Bayesian linear estimate. To first
order that is the linearised variance g' (J'J / s^2 + sum of new j j' / s^2)^-1 g; it needs no table, only fit.json.
"""

import dataclasses
import math

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.laws.base import Array
from lm.scaling.planning.optimum import Surface
from lm.scaling.result import FitResult

STRETCH = 2.0  # how far past the fitted range a proposed run may lie
RATIOS = 33  # candidate ratios of tokens to parameters
SHARES = (1, 0.9, 0.8, 2 / 3, 0.6, 0.5, 0.4, 1 / 3, 0.25, 0.2, 1 / 6, 0.125, 0.1, 0.05, 0.02, 0.01)  # of the cap
SPLITS = (1.0, 0.5, 0.25, 0.1)  # greedy starts: what each run may cost of what the one before may
ENOUGH = 1e-6  # of the variance: an exchange that gains less is none
ROUNDING = 1e-9  # of a limit, of the cap, of n
LEAST_NOISE = 1e-6  # of a loss: a fit without any would know the law from a handful of runs
FEWEST_SAMPLES = 20
MOST_RUNS = 100


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where runs may be proposed: lowest and highest n, d and tokens per parameter."""

    n: tuple[float, float]
    d: tuple[float, float]
    tokens_per_parameter: tuple[float, float]

    def hold(self, n: Array, d: Array) -> Array:
        """Which of the runs [G] lie within."""
        values = ((self.n, n), (self.d, d), (self.tokens_per_parameter, d / n))
        return np.all(
            [(low * (1 - ROUNDING) <= value) & (value <= high * (1 + ROUNDING)) for (low, high), value in values],
            axis=0,
        )

    def __str__(self) -> str:
        spans = (f"{low:.3g} to {high:.3g}" for low, high in dataclasses.astuple(self))
        return "n {}, d {} and d/n {}".format(*spans)


@dataclasses.dataclass(frozen=True)
class Run:
    """One proposed run: `n` parameters on `d` tokens for `c` training FLOP."""

    n: float
    d: float
    c: float


@dataclasses.dataclass(frozen=True)
class NextRuns:
    """The proposal for one planned `budget`: `runs`, costing at most `cap` FLOP together, within `limits`.

    `width_before` and `width_after` are the 95 % interval's upper over lower end of N* now and as expected with them.
    """

    budget: float
    cap: float
    stretch: float
    limits: Limits
    runs: tuple[Run, ...]
    width_before: float
    width_after: float


def limits_of(result: FitResult) -> Limits:
    """The fitted ranges of n, d and d/n, each widened by `STRETCH` both ways, but for shorter runs than any fitted.

    Raises:
      UsageError: the fit is of a version that did not record the last.
    """
    if "tokens_per_parameter" not in result.fitted_range:
        raise UsageError(
            "the fit does not say its range of tokens per parameter", where="--fit", do="Fit again, or pass --next 0."
        )
    (n_low, n_high), (d_low, d_high), (low, high) = (
        result.fitted_range[field.name] for field in dataclasses.fields(Limits)
    )
    # A law of finished runs does not hold for one that is mostly warm-up.
    return Limits((n_low / STRETCH, n_high * STRETCH), (d_low, d_high * STRETCH), (low / STRETCH, high * STRETCH))


def candidates(limits: Limits, cap: float, flops_per_nd: float) -> tuple[Array, Array]:
    """n and d (each [G]) of the runs to choose from: ratios by shares of the cap, as far as they lie within limits."""
    ratio, cost = np.meshgrid(np.geomspace(*limits.tokens_per_parameter, RATIOS), cap * np.array(SHARES))
    n = np.sqrt(cost / (flops_per_nd * ratio)).ravel()
    d = n * ratio.ravel()
    inside = limits.hold(n, d)
    return n[inside], d[inside]


def next_runs(
    result: FitResult, surface: Surface, aim: Array, *, budget: float, count: int, cap: float | None = None
) -> NextRuns:
    """Proposes `count` runs of at most `cap` training FLOP in all (default: the largest fitted budget).

    `surface` holds the fit's resamples [R, P], `aim` their log N* [R] at the planned `budget`.

    Raises:
      UsageError: more than 100 runs, a cap under which none lies within the limits, or fewer than 20 resamples.
    """
    cap = result.fitted_range["c"][1] if cap is None else cap
    if not 1 <= count <= MOST_RUNS or not 0 < cap < math.inf:
        do = f"Give positive numbers, and at most {MOST_RUNS} runs."
        raise UsageError(f"{count} runs for {cap:g} FLOP", where="--next, --next-budget", do=do)
    if len(aim) < FEWEST_SAMPLES:
        raise UsageError(f"{len(aim)} resamples tell no interval", where="--fit", do="Fit with --bootstrap 1000.")
    limits = limits_of(result)
    largest = surface.flops_per_nd * limits.n[1] * limits.d[1]  # its d/n lies between those of largest n and largest d
    n, d = candidates(limits, min(cap, largest), surface.flops_per_nd)
    cost = surface.flops_per_nd * n * d
    if not len(n) or np.sort(cost)[0] * count > cap * (1 + ROUNDING):
        raise UsageError(
            f"{cap:.3g} FLOP pay for no {count} runs with {limits}",
            where="--next-budget",
            do=f"The fitted runs cost {result.fitted_range['c'][0]:.3g} to {result.fitted_range['c'][1]:.3g} each.",
        )
    rows = (len(aim), len(n))
    losses = surface.log_loss(np.broadcast_to(np.log(n), rows), np.broadcast_to(np.log(d), rows))
    chosen, left = choose(aim, losses, noise_of(result), cost / cap, count)
    low, high = np.quantile(aim, [0.025, 0.975])
    return NextRuns(
        budget,
        cap,
        STRETCH,
        limits,
        tuple(Run(float(n[k]), float(d[k]), float(cost[k])) for k in sorted(chosen, key=lambda k: -cost[k])),
        float(np.exp(high - low)),
        float(np.exp((high - low) * math.sqrt(left))),
    )


def choose(aim: Array, losses: Array, noise: float, cost: Array, count: int) -> tuple[list[int], float]:
    """The candidates (`cost` [G], at most 1 in all) whose log `losses` [R, G] say most about `aim` [R] over resamples.

    Greedy from several splits of the cost, each improved by exchanging one run at a time. Returns the indices, one
    more than once where a repeat says most, and the share of the variance of `aim` that is expected to stay.
    """
    deviation, target = losses - losses.mean(0), aim - aim.mean()
    covariance, with_aim = deviation.T @ deviation / len(aim), deviation.T @ target / len(aim)
    variance, cheapest = max(float(target @ target) / len(aim), ROUNDING**2), cost.min()

    def explained(given: list[int], most: float) -> Array:
        """The variance [G] that the `given` runs and one more, of a cost of at most `most`, explain together."""
        within = covariance[np.ix_(given, given)] + noise**2 * np.eye(len(given))
        weights = np.linalg.solve(within, covariance[given])
        already = with_aim[given] @ np.linalg.solve(within, with_aim[given])
        rest = with_aim - with_aim[given] @ weights
        spread = np.diag(covariance) - (weights * covariance[given]).sum(0)
        return np.where(cost <= most + ROUNDING, already + rest**2 / (spread + noise**2), -np.inf)

    def descend(split: float) -> tuple[float, list[int]]:
        shares = split ** np.arange(count) / np.sum(split ** np.arange(count))
        picked: list[int] = []
        for place, share in enumerate(shares):
            room = 1 - cost[picked].sum() - cheapest * (count - 1 - place)
            picked.append(int(np.argmax(explained(picked, min(max(share, cheapest), room)))))
        reached, moved = -np.inf, True
        while moved:
            moved = False
            for place in range(count):
                others = picked[:place] + picked[place + 1 :]
                total = explained(others, 1 - cost[others].sum())
                if total.max() > reached + ENOUGH * variance:
                    picked[place], reached, moved = int(np.argmax(total)), float(total.max()), True
        return reached, picked

    reached, picked = max(descend(split) for split in SPLITS)
    return picked, max(0.0, 1 - reached / variance)


def noise_of(result: FitResult) -> float:
    """How far a new run's log loss may lie from the law as the fit weighs it: the standard deviation of its noise.

    That of residuals (or of repeated points where larger), over the root of the objective's efficiency under normal
    noise: beyond its delta Huber's objective weighs a point less than least squares do (Huber 1964).
    """
    from scipy.special import ndtr

    spread = max(result.noise["residual_sd"] or 0.0, result.noise["seed_sd"] or 0.0, LEAST_NOISE)
    delta = result.objective["delta"]
    if delta is None:
        return spread
    if delta == 0:
        return spread * math.sqrt(math.pi / 2)
    reach = delta / spread
    density, inside = math.exp(-(reach**2) / 2) / math.sqrt(2 * math.pi), 2 * float(ndtr(reach)) - 1
    pull = inside - 2 * reach * density + reach**2 * (1 - inside)
    return spread * math.sqrt(pull) / inside
