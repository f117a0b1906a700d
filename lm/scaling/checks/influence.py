"""Which rows the answer hangs on: refits without each row, and without the few that move it furthest."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.scaling import read
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.objective import Array
from lm.scaling.fitting.quantities import quantities
from lm.scaling.fitting.solve import minimise

MOST_SINGLE, BANDS = 500, 40
BAND = "band of compute"
SHOWN_POINTS = 5
ALMOST_ABSOLUTE = 1e-4  # Huber's delta in place of absolute deviations: one stage of solving instead of six
MOST_DROPPED, CANDIDATES = 8, 24
MOST_BANDS_DROPPED, BAND_CANDIDATES = 3, 6
FEW = 3
NORMAL = 1.959964  # half the width of a 95 % interval in standard errors


def analyse(
    fitted: Fitted, budget: float, intervals: Mapping[str, Sequence[float | None] | None], clusters: Array | None = None
) -> dict[str, Any]:
    """The influence part of `fit.json`: {of, unit, half_width, points, largest, greedy, warnings}, or why `refused`.

    One row (or cluster; over 500 rows one of 40 bands of compute) is left out at a time. `points` are those that move
    the target furthest: the headline of the fit, mostly a; `largest` names the furthest move of every parameter, a and
    N* at `budget`. `greedy` leaves out up to 8 in turn, towards smaller and
    larger values of the target; the candidates of each turn are the 24 whose own absence moves it furthest that way.
    Least absolute deviations are refitted, without rows and with all, as Huber's sum with delta 1e-4. `half_width` is
    that of the target's 95 % interval among `intervals`; by the jackknife where it has none.
    """
    codes, unit = _groups(fitted, clusters)
    groups, target = int(codes.max()) + 1, fitted.headline
    left, needed = len(codes) - int(np.bincount(codes).max()), int(fitted.problem.free.sum())
    if left <= needed:
        return {
            "of": target,
            "unit": unit,
            "refused": f"without one {unit} {left} points are left for {needed} parameters",
        }
    # The first row leaves out nothing.
    kept = codes[None] != np.arange(-1, groups)[:, None]
    refitted = _values(fitted, _refit(fitted, kept, np.repeat(fitted.theta[None], groups + 1, 0)), budget)
    whole = {name: values[0] for name, values in refitted.items()}
    left_out = {name: values[1:] for name, values in refitted.items()}
    with np.errstate(invalid="ignore"):  # an optimum that runs away is infinite with and without a row
        moved = {name: left_out[name] - whole[name] for name in whole}
    half_width = _half_width(intervals.get(target), left_out[target])
    greedy, dropped = _greedy(fitted, codes, unit, budget, target, moved[target])
    order = np.argsort(-np.abs(moved[target]))[:SHOWN_POINTS]
    largest = {name: int(np.argmax(np.nan_to_num(np.abs(moves)))) for name, moves in moved.items()}
    return {
        "of": target,
        "unit": unit,
        "half_width": half_width,
        "points": [
            {
                "rows": _label(fitted, codes == k, unit),
                "without": {name: _finite(left_out[name][k]) for name in left_out},
            }
            for k in order
        ],
        "largest": {
            name: {
                "rows": _label(fitted, codes == k, unit),
                "with": _finite(whole[name]),
                "without": _finite(left_out[name][k]),
            }
            for name, k in largest.items()
        },
        "greedy": greedy,
        "warnings": _warnings(greedy, dropped, target, float(whole[target]), half_width, left_out[target], unit),
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis in plain text."""
    if "refused" in part:
        return [f"influence: not measured, {part['refused']}"]
    of, whole = part["of"], part["largest"][part["of"]]["with"]
    moves = ", ".join(f"{row['rows']} {row['without'][of] - whole:+.4f}" for row in part["points"])
    shown = [f"influence: {of} moves most without {moves}; half its 95 % interval is {part['half_width']:.4f}"]
    for way in ("down", "up"):
        steps = part["greedy"][way]
        if steps:
            values = ", ".join(f"{step[of]:.4f}" for step in steps)
            left = "; ".join(step["rows"] for step in steps)
            shown.append(f"  furthest {way}: {values} without 1 to {len(steps)} of them: {left}")
    return shown


def _groups(fitted: Fitted, clusters: Array | None) -> tuple[Array, str]:
    points = len(fitted.found)
    if clusters is not None:
        return clusters, "cluster"
    if points <= MOST_SINGLE:
        return np.arange(points), "row"
    ranks = np.empty(points, int)
    ranks[np.argsort(fitted.found.c, kind="stable")] = np.arange(points)
    return ranks * BANDS // points, BAND


def _half_width(interval: Sequence[float | None] | None, left_out: Array) -> float:
    low, high = interval or (None, None)
    if low is not None and high is not None:
        return (high - low) / 2
    groups = len(left_out)
    return NORMAL * float(np.sqrt((groups - 1) / groups * np.sum((left_out - left_out.mean()) ** 2)))


def _refit(fitted: Fitted, kept: Array, starts: Array) -> Array:
    weights = kept.astype(np.float64)
    objective = fitted.problem.objective
    if objective.delta == 0:
        objective = dataclasses.replace(objective, delta=ALMOST_ABSOLUTE)
    return minimise(dataclasses.replace(fitted.problem, weights=weights, objective=objective), starts).theta


def _values(fitted: Fitted, theta: Array, budget: float) -> dict[str, Array]:
    """What is watched, each [R]: the parameters and, by law, a, N* and tokens/parameter at `budget`."""
    named = quantities(fitted.law, fitted.natural(theta), [budget], fitted.found.flops_per_nd)
    watched = [*fitted.law.parameters, "a", f"n@{budget:.6g}", f"tokens_per_parameter@{budget:.6g}"]
    return {name: named[name] for name in watched if name in named}


def _greedy(
    fitted: Fitted, codes: Array, unit: str, budget: float, target: str, moved: Array
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[int]]]:
    """Leaves out, one after the other, what moves the target furthest down and up; both ways are solved at once.

    The steps and the groups that were left out at each.
    """
    few = unit != BAND
    order = np.argsort(moved)
    count = CANDIDATES if few else BAND_CANDIDATES
    most = min(MOST_DROPPED if few else MOST_BANDS_DROPPED, (len(order) - len(fitted.theta)) // 2)
    pools = {"down": order[:count], "up": order[::-1][:count]}
    dropped: dict[str, list[int]] = {way: [] for way in pools}
    theta = dict.fromkeys(pools, fitted.theta)
    steps: dict[str, list[dict[str, Any]]] = {way: [] for way in pools}
    for _ in range(most):
        tried = [(way, int(k)) for way, pool in pools.items() for k in pool if k not in dropped[way]]
        kept = np.stack([~np.isin(codes, [*dropped[way], k]) for way, k in tried])
        solved = _refit(fitted, kept, np.stack([theta[way] for way, _ in tried]))
        values = _values(fitted, solved, budget)
        for way, sign in (("down", 1), ("up", -1)):
            mine = np.array([row for row, (other, _) in enumerate(tried) if other == way])
            best = mine[np.argmin(sign * values[target][mine])]
            dropped[way].append(tried[best][1])
            theta[way] = solved[best]
            label = _label(fitted, codes == tried[best][1], unit)
            steps[way].append({"rows": label, **{name: _finite(value[best]) for name, value in values.items()}})
    return steps, dropped


def _label(fitted: Fitted, mask: Array, unit: str) -> str:
    if unit == BAND:
        return f"C from {fitted.found.c[mask].min():.3g} to {fitted.found.c[mask].max():.3g}"
    return read.rows(mask, fitted.found.table)


def _warnings(
    greedy: Mapping[str, Sequence[Mapping[str, Any]]],
    dropped: Mapping[str, Sequence[int]],
    target: str,
    whole: float,
    half_width: float,
    left_out: Array,
    unit: str,
) -> list[str]:
    """Up to three groups that move the target further than the others leave it uncertain.

    An outlier widens the interval that it is measured by: it counts against the interval of the others where that is
    narrower (their part of the jackknife).
    """
    found = []
    for way, steps in greedy.items():
        for count, step in enumerate(steps[:FEW], 1):
            others = np.delete(left_out, dropped[way][:count])
            if abs(step[target] - whole) > min(half_width, _half_width(None, others)):
                left = "; ".join(other["rows"] for other in steps[:count])
                found.append(
                    f"{target} hangs on {count} {unit}{'s' * (count > 1)}: without {left} it is {step[target]:.4g} "
                    f"instead of {whole:.4g}, further than half the 95 % interval that the others give"
                )
                break
    return found


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
