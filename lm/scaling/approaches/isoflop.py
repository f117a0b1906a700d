"""IsoFLOP (approach 2): a parabola in log N and in log D per budget, minima with intervals, refusals with reasons."""

import dataclasses
from typing import Any

import numpy as np

from lm.scaling.read import Points, optional

Array = np.ndarray

LEAST_SIZES = 4
SAME_BUDGET = 0.05
DRAWS = 4000


@dataclasses.dataclass(frozen=True)
class _Parabola:
    """loss = level + curve * (x - centre - shift)^2, fitted by least squares in x = log N or log D, centred.

    `draws` [K] are log minima under the uncertainty of the coefficients; NaN where a draw has no minimum.
    """

    minimum: float
    level: float
    coefficients: tuple[float, float, float]
    draws: Array
    residual: float
    depth: float
    curve: float


def analyse(found: Points, *, seed: int) -> dict[str, Any]:
    """The IsoFLOP part of `fit.json`: {budgets, refused, exponents, noise, notes}.

    A budget is refused when it has fewer than 4 sizes, its curve has no minimum or has it at the edge of the sizes, its
    residuals are as large as the curve is deep, or the interval of its minimum leaves the sampled sizes.
    Intervals draw the coefficients from their multivariate t distribution with the residual noise pooled over budgets.
    """
    codes, budgets = group_budgets(found)
    random = np.random.default_rng(seed)
    shapes: dict[int, tuple[Array, Array]] = {}
    refused: list[dict[str, Any]] = []
    for k, budget in enumerate(budgets):
        rows = np.flatnonzero(codes == k)
        if np.unique(found.n[rows]).size == 1:
            continue  # a lone size was never meant as a curve: a grid of N x D has many
        reason = _shape_refusal(np.log(found.n[rows]), found.loss[rows]) or _shape_refusal(
            np.log(found.d[rows]), found.loss[rows]
        )
        if reason:
            refused.append({"budget": float(budget), "reason": reason})
        else:
            shapes[k] = (rows, random.standard_normal((DRAWS, 3)))
    squares, freedom = _pool(found, [rows for rows, _ in shapes.values()])
    sd = np.sqrt(squares / freedom) if freedom else 0.0
    tails = np.sqrt(freedom / random.chisquare(freedom, DRAWS)) if freedom else np.ones(DRAWS)
    accepted, draws_n, draws_d = [], [], []
    for k, (rows, normal) in shapes.items():
        in_n = _parabola(np.log(found.n[rows]), found.loss[rows], sd, normal * tails[:, None])
        in_d = _parabola(np.log(found.d[rows]), found.loss[rows], sd, normal * tails[:, None])
        reason = _interval_refusal(in_n, np.log(found.n[rows]), "sizes") or _interval_refusal(
            in_d, np.log(found.d[rows]), "tokens"
        )
        if reason:
            refused.append({"budget": float(budgets[k]), "reason": reason})
            continue
        draws_n.append(in_n.draws)
        draws_d.append(in_d.draws)
        accepted.append(
            {
                "budget": float(budgets[k]),
                "n": float(np.exp(in_n.minimum)),
                "d": float(np.exp(in_d.minimum)),
                "n_interval": _ends(in_n.draws),
                "d_interval": _ends(in_d.draws),
                "loss": in_n.level,
                "tokens_per_parameter": float(np.exp(in_d.minimum - in_n.minimum)),
                "coefficients": list(in_n.coefficients),
                "points": [
                    [float(n), float(d), float(loss)]
                    for n, d, loss in zip(found.n[rows], found.d[rows], found.loss[rows], strict=True)
                ],
            }
        )
    refused.sort(key=lambda entry: entry["budget"])
    exponents, notes = _exponents(accepted, draws_n, draws_d)
    return {
        "budgets": accepted,
        "refused": refused,
        "exponents": exponents,
        "noise": float(sd),
        "notes": notes,
        "coefficients_meaning": "loss = c0 + c1 x + c2 x^2 with x = ln N",
    }


def group_budgets(found: Points) -> tuple[Array, Array]:
    """Budget codes [points] and budgets [G] in FLOP: the column `budget` where there is one, else c within 5 %."""
    named = optional(found.table, "budget") if "budget" in found.table else np.zeros(len(found))
    if (named > 0).all():  # our own table says 0 outside a ladder
        budgets, codes = np.unique(named, return_inverse=True)
        return codes, budgets
    order = np.argsort(found.c)
    steps = np.diff(np.log(found.c[order])) > SAME_BUDGET
    codes = np.empty(len(order), int)
    codes[order] = np.concatenate([[0], np.cumsum(steps)])
    return codes, np.exp(np.bincount(codes, np.log(found.c)) / np.bincount(codes))


def power_law(log_c: Array, log_x: Array, weights: Array | None = None) -> tuple[float, float]:
    """Weighted least squares of log x on log c: the exponent, and log of x at c = 1."""
    weights = np.ones_like(log_c) if weights is None else weights
    mean_c, mean_x = np.average(log_c, weights=weights), np.average(log_x, weights=weights)
    slope = np.sum(weights * (log_c - mean_c) * (log_x - mean_x)) / np.sum(weights * (log_c - mean_c) ** 2)
    return float(slope), float(mean_x - slope * mean_c)


def parabola_minimum(x: Array, loss: Array) -> float:
    """Where the least-squares parabola of loss over x (log N or log D) has its extremum, in x."""
    return _parabola(x, loss, 0.0, np.zeros((1, 3))).minimum


def _shape_refusal(x: Array, loss: Array) -> str | None:
    sizes = np.unique(np.round(x, 6)).size
    if sizes < LEAST_SIZES:
        return f"{sizes} size{'s' * (sizes != 1)}: at least {LEAST_SIZES} are needed"
    fit = _parabola(x, loss, 0.0, np.zeros((1, 3)))
    if fit.curve <= 0:
        return "wrong curvature: the fitted parabola has a maximum"
    if not x.min() < fit.minimum < x.max():
        return "the minimum is outside the sampled sizes"
    means = np.array([loss[np.abs(x - at) < 1e-6].mean() for at in np.unique(np.round(x, 6))])
    if means.argmin() in (0, len(means) - 1):
        return "the lowest loss is at the edge of the sampled sizes"
    if fit.residual >= fit.depth:
        return f"residuals ({fit.residual:.2g} nats) are as large as the curve is deep ({fit.depth:.2g})"
    return None


def _interval_refusal(fit: _Parabola, x: Array, what: str) -> str | None:
    low, high = np.quantile(np.where(np.isfinite(fit.draws), fit.draws, np.inf), [0.025, 0.975], method="lower")
    if np.mean(~np.isfinite(fit.draws)) > 0.025:
        return "the curvature is not distinguishable from 0 at 95 %"
    if low < x.min() or high > x.max():
        return f"the 95 % interval of the minimum leaves the sampled {what}"
    return None


def _parabola(x: Array, loss: Array, sd: float, normal: Array) -> _Parabola:
    centre = x.mean()
    design = np.stack([np.ones_like(x), x - centre, (x - centre) ** 2], axis=1)
    (c0, c1, c2), *_ = np.linalg.lstsq(design, loss, rcond=None)
    residual = loss - design @ np.array([c0, c1, c2])
    root = np.linalg.cholesky(np.linalg.inv(design.T @ design))
    drawn = np.array([c0, c1, c2]) + sd * normal @ root.T
    with np.errstate(divide="ignore", invalid="ignore"):
        minima = np.where(drawn[:, 2] > 0, centre - drawn[:, 1] / (2 * drawn[:, 2]), np.nan)
    minimum = centre - c1 / (2 * c2)
    level = c0 - c1**2 / (4 * c2)
    depth = float((loss - residual).max() - level)
    freedom = max(len(x) - 3, 1)
    return _Parabola(
        float(minimum),
        float(level),
        (float(c0 - c1 * centre + c2 * centre**2), float(c1 - 2 * c2 * centre), float(c2)),
        minima,
        float(np.sqrt(np.sum(residual**2) / freedom)),
        depth,
        float(c2),
    )


def _pool(found: Points, groups: list[Array]) -> tuple[float, int]:
    squares, freedom = 0.0, 0
    for rows in groups:
        x = np.log(found.n[rows])
        design = np.stack([np.ones_like(x), x - x.mean(), (x - x.mean()) ** 2], axis=1)
        fitted = design @ np.linalg.lstsq(design, found.loss[rows], rcond=None)[0]
        squares += float(np.sum((found.loss[rows] - fitted) ** 2))
        freedom += len(rows) - 3
    return squares, freedom


def _ends(draws: Array) -> list[float]:
    return [float(end) for end in np.exp(np.quantile(draws[np.isfinite(draws)], [0.025, 0.975]))]


def _exponents(
    accepted: list[dict[str, Any]], draws_n: list[Array], draws_d: list[Array]
) -> tuple[dict[str, Any], list[str]]:
    if len(accepted) < 2:
        return {}, [
            f"{len(accepted)} usable budget{'s' * (len(accepted) != 1)}: an exponent needs two, its interval three"
        ]
    log_c = np.log([entry["budget"] for entry in accepted])
    found = {}
    for name, key, draws in (("a", "n", draws_n), ("b", "d", draws_d)):
        log_x = np.log([entry[key] for entry in accepted])
        slope, constant = power_law(log_c, log_x)
        found[name] = {
            "value": slope,
            "interval": _slope_interval(log_c, log_x, slope, constant, np.stack(draws)),
            "coefficient": float(np.exp(constant)),
        }
    notes = ["two usable budgets: a line through two points has no honest interval"] if len(accepted) == 2 else []
    return found, notes


def _slope_interval(log_c: Array, log_x: Array, slope: float, constant: float, draws: Array) -> list[float] | None:
    """The wider of the regression's t interval and what the noise of the minima moves the slope by; None for two."""
    if len(log_c) < 3:
        return None
    from scipy.special import stdtrit

    freedom = len(log_c) - 2
    residual = log_x - constant - slope * log_c
    centred = log_c - log_c.mean()
    by_scatter = stdtrit(freedom, 0.975) * np.sqrt(np.sum(residual**2) / freedom / np.sum(centred**2))
    slopes = centred @ np.nan_to_num(draws, nan=0.0) / np.sum(centred**2)
    whole = np.isfinite(draws).all(axis=0)
    low, high = np.quantile(slopes[whole], [0.025, 0.975])
    return [float(min(slope - by_scatter, low)), float(max(slope + by_scatter, high))]
