"""IsoFLOP (approach 2): a curve in log N and in log D per budget, minima with intervals, refusals with reasons."""

from typing import Any

import numpy as np

from lm.scaling.approaches.curve import LEAST_SIZES, PARABOLA, Curve, coefficients, residuals
from lm.scaling.read import Points, optional
from lm.scaling.words import entry, span

Array = np.ndarray

SAME_BUDGET = 0.05
WIDEST_BUDGET = 1.3  # largest over smallest compute: points that are each near the next may be far from one another
DRAWS, FEWEST_DRAWS, DRAWN_NUMBERS = 4000, 200, 4_000_000
SHOWN_REFUSALS = 12


def analyse(found: Points, *, seed: int, curve: Curve = PARABOLA) -> dict[str, Any]:
    """The IsoFLOP part of `fit.json`: {curve, budgets, refused, exponents, noise, notes}.

    A budget is refused when it has fewer than 4 sizes, its curve has no minimum or has it at the edge of the sizes, its
    residuals are as large as the curve is deep, or the interval of its minimum leaves the sampled sizes.
    Intervals read the minima off draws of the losses with normal noise of the size of the parabolas' residuals, pooled
    over budgets: for a parabola that is the multivariate t distribution of its coefficients.
    """
    codes, budgets = group_budgets(found)
    random = np.random.default_rng(seed)
    shapes: dict[int, Array] = {}
    refused: list[dict[str, Any]] = []
    for k, budget in enumerate(budgets):
        rows = np.flatnonzero(codes == k)
        if np.unique(found.n[rows]).size == 1:
            continue  # a lone size was never meant as a curve: a grid of N x D has many
        reason = (
            _spread_refusal(found.c[rows])
            or curve.refusal(np.log(found.n[rows]), found.loss[rows])
            or curve.refusal(np.log(found.d[rows]), found.loss[rows])
        )
        if reason:
            refused.append({"budget": float(budget), "reason": reason})
        else:
            shapes[k] = rows
    squares = sum(float(np.sum(residuals(np.log(found.n[rows]), found.loss[rows]) ** 2)) for rows in shapes.values())
    freedom = sum(len(rows) - 3 for rows in shapes.values())
    sd = np.sqrt(squares / freedom) if freedom else 0.0
    count = int(np.clip(DRAWN_NUMBERS / max(map(len, shapes.values()), default=1), FEWEST_DRAWS, DRAWS))
    sizes = sd * (np.sqrt(freedom / random.chisquare(freedom, count)) if freedom else np.ones(count))
    accepted, draws_n, draws_d = [], [], []
    for k, rows in shapes.items():
        in_n, in_d, loss = np.log(found.n[rows]), np.log(found.d[rows]), found.loss[rows]
        noisy = loss + sizes[:, None] * random.standard_normal((count, len(rows)))
        drawn_n, drawn_d = (curve.minima(x, noisy)[0] for x in (in_n, in_d))
        reason = _interval_refusal(curve, drawn_n, in_n, "sizes") or _interval_refusal(curve, drawn_d, in_d, "tokens")
        if reason:
            refused.append({"budget": float(budgets[k]), "reason": reason})
            continue
        draws_n.append(drawn_n)
        draws_d.append(drawn_d)
        (log_n,), (level,) = curve.minima(in_n, loss[None])
        (log_d,), _ = curve.minima(in_d, loss[None])
        accepted.append(
            {
                "budget": float(budgets[k]),
                "n": float(np.exp(log_n)),
                "d": float(np.exp(log_d)),
                "n_interval": _ends(drawn_n),
                "d_interval": _ends(drawn_d),
                "loss": float(level),
                "tokens_per_parameter": float(np.exp(log_d - log_n)),
                "points": [
                    [float(n), float(d), float(at)] for n, d, at in zip(found.n[rows], found.d[rows], loss, strict=True)
                ],
            }
        )
        if curve is PARABOLA:
            accepted[-1]["coefficients"] = _plain_coefficients(in_n, loss)
    refused.sort(key=lambda entry: entry["budget"])
    exponents, notes = _exponents(accepted, draws_n, draws_d)
    part = {
        "curve": curve.name,
        "budgets": accepted,
        "refused": refused,
        "exponents": exponents,
        "noise": float(sd),
        "notes": notes,
    }
    return part | ({"coefficients_meaning": "loss = c0 + c1 x + c2 x^2 with x = ln N"} if curve is PARABOLA else {})


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis as text: budgets with their minima, refusals with their reasons, exponents."""
    usable, refused = part["budgets"], part["refused"]
    found = [f"IsoFLOP by {part['curve']}: {len(usable)} usable budgets, {len(refused)} refused"]
    found += [
        f"  C = {row['budget']:.4g}: N* {span(row['n'], row['n_interval'])}, D* {span(row['d'], row['d_interval'])}, "
        f"tokens/parameter {row['tokens_per_parameter']:.4g}, loss {row['loss']:.5f}"
        for row in usable
    ]
    found += [f"  C = {row['budget']:.4g}: refused: {row['reason']}" for row in refused[:SHOWN_REFUSALS]]
    if len(refused) > SHOWN_REFUSALS:
        found.append(f"  and {len(refused) - SHOWN_REFUSALS} more refused (all in the fit file)")
    if part["exponents"]:
        found.append(
            "  exponents: " + ", ".join(f"{name} = {entry(value)}" for name, value in part["exponents"].items())
        )
    return found + [f"  {note}" for note in part["notes"]]


def in_budgets(found: Points) -> bool:
    """Whether the table is of the IsoFLOP kind: mostly runs that share their compute with at least three others."""
    return bool(np.median(np.bincount(group_budgets(found)[0])) >= LEAST_SIZES)


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


def rows_of(found: Points, budgets: Array) -> list[Array]:
    """The rows [points of it] of each of `budgets` [B], as `group_budgets` gave them."""
    codes, all_budgets = group_budgets(found)
    return [np.flatnonzero(codes == np.abs(all_budgets - budget).argmin()) for budget in budgets]


def power_law(log_c: Array, log_x: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Weighted least squares of log x [..., G] on log c [G]: exponents [...], and log of x at c = 1 [...].

    A NaN in `log_x` is left out; NaN where fewer than two are left.
    """
    known = np.isfinite(log_x)
    weights = known * (1.0 if weights is None else weights)
    log_x = np.where(known, log_x, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_c, mean_x = ((weights * part).sum(-1) / weights.sum(-1) for part in (log_c, log_x))
        away = log_c - mean_c[..., None]
        slope = (weights * away * log_x).sum(-1) / (weights * away**2).sum(-1)
    slope = np.where(known.sum(-1) > 1, slope, np.nan)
    return slope, mean_x - slope * mean_c


def parabola_minimum(x: Array, loss: Array) -> float:
    """Where the least-squares parabola of loss over x (log N or log D) has its minimum, in x; NaN for a maximum."""
    return float(PARABOLA.minima(x, loss[None])[0][0])


def _plain_coefficients(x: Array, loss: Array) -> list[float]:
    """c0, c1, c2 of the parabola in x itself, not centred."""
    (c0, c1, c2), centre = coefficients(x, loss[None])[0], x.mean()
    return [float(c0 - c1 * centre + c2 * centre**2), float(c1 - 2 * c2 * centre), float(c2)]


def _spread_refusal(c: Array) -> str | None:
    factor = c.max() / c.min()
    return f"its compute runs over a factor of {factor:.3g}: no one budget" if factor > WIDEST_BUDGET else None


def _interval_refusal(curve: Curve, draws: Array, x: Array, what: str) -> str | None:
    low, high = np.quantile(np.where(np.isfinite(draws), draws, np.inf), [0.025, 0.975], method="lower")
    if np.mean(~np.isfinite(draws)) > 0.025:
        return curve.doubtful
    if low < x.min() or high > x.max():
        return f"the 95 % interval of the minimum leaves the sampled {what}"
    return None


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
        slope, constant = (float(part) for part in power_law(log_c, log_x))
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
