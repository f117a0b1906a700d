"""The best value of a setting (learning rate, batch size) at each n and d: interpolated, with its flat range."""

import dataclasses
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.laws.base import Law
from lm.scaling.laws.setting import OPTIMUM_D, OPTIMUM_N, OPTIMUM_ND

Array = np.ndarray

LEAST_VALUES = 3
NEAR = 0.0025  # of the loss: such runs count as near-optimal (Li et al. 2025)
SHOWN_CELLS = 24


@dataclasses.dataclass(frozen=True)
class Interpolated:
    """Where a loss is least over a setting: the setting's value, and what stood against an interpolated minimum."""

    at: float
    refusal: str | None = None


def interpolate(values: Array, losses: Array) -> Interpolated:
    """The vertex of the parabola in log value through the least loss and its two neighbours.

    `values` [K] are distinct, rising and positive. A least loss at an edge, or three equal losses, stand for themselves
    and are named.
    """
    x = np.log(values)
    best = int(np.argmin(losses))
    if best in (0, len(x) - 1):
        return Interpolated(
            float(values[best]), f"the least loss is at the edge of the values tried ({values[best]:.4g})"
        )
    around = slice(best - 1, best + 2)
    a, b, _ = np.polyfit(x[around] - x[best], losses[around], 2)
    if a <= 0:
        return Interpolated(float(values[best]), "no curvature: the losses beside the least one are equal to it")
    vertex = np.clip(-b / (2 * a), x[best - 1] - x[best], x[best + 1] - x[best])
    return Interpolated(float(np.exp(x[best] + vertex)))


def optima(found: read.Points, name: str) -> tuple[read.Points, dict[str, Any]]:
    """The optimum of column `name` at each (n, d) as points whose loss is the setting, and their part of `fit.json`.

    Other settings are at their best: of the runs of a cell with one value of the setting, the one with the least loss
    counts. A cell is refused where fewer than 3 values were tried or none of the inner ones is best. The part holds
    {column, near, cells: [{n, d, value, near_range, loss, values}], refused: [{n, d, reason}]}; `near_range` is where
    the tried values with a loss within 0.25 % of the best lie.

    Raises:
      UsageError: no such column, a value that is not positive, or no cell with an optimum.
    """
    setting = read.numbers(found.table, name, "--optimum-of")
    codes = read.repeats(found)
    kept: list[int] = []
    cells: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for code in range(codes.max() + 1):
        rows = np.flatnonzero(codes == code)
        order = rows[np.lexsort((found.loss[rows], setting[rows]))]
        first = np.unique(np.round(np.log(setting[order]), 6), return_index=True)[1]
        best_of_each = order[first]
        values, losses = setting[best_of_each], found.loss[best_of_each]
        at = {"n": float(found.n[rows[0]]), "d": float(found.d[rows[0]])}
        if len(values) < LEAST_VALUES:
            reason = f"{len(values)} value{'s' * (len(values) != 1)} of {name}: at least {LEAST_VALUES} are needed"
            refused.append({**at, "reason": reason})
            continue
        optimum = interpolate(values, losses)
        if optimum.refusal:
            refused.append({**at, "reason": optimum.refusal})
            continue
        near = values[losses <= losses.min() * (1 + NEAR)]
        kept.append(int(best_of_each[losses.argmin()]))
        cells.append(
            {
                **at,
                "value": optimum.at,
                "near_range": [float(near.min()), float(near.max())],
                "loss": float(losses.min()),
                "values": len(values),
            }
        )
    if not cells:
        told = "; ".join(sorted({entry["reason"] for entry in refused})[:3])
        raise UsageError(
            f"no (n, d) has an optimum of '{name}': {told}",
            where="--optimum-of",
            do="Give runs that differ in it at equal n and d, on both sides of the best value.",
        )
    optimal = found.subset(np.array(kept))
    warnings = [*found.warnings]
    if refused:
        warnings.append(
            f"no optimum of {name} at {len(refused)} of {len(cells) + len(refused)} (n, d), which are left out"
        )
    convention = f"fitted is {name}, in the unit of its column: its value at the interpolated least loss of each (n, d)"
    return (
        dataclasses.replace(
            optimal,
            loss=np.array([cell["value"] for cell in cells]),
            conventions=(*found.conventions, convention),
            warnings=tuple(warnings),
        ),
        {"column": name, "near": NEAR, "cells": cells, "refused": refused},
    )


def law_of(found: read.Points) -> Law:
    """The law that the optima allow: in n and d, in one of them where the other does not vary, else none.

    Raises:
      UsageError: all optima are at one n and d.
    """
    varies = {name: np.ptp(np.log(found.variable(name))) > read.SAME for name in ("n", "d")}
    if not any(varies.values()):
        raise UsageError("all optima are at one n and d: nothing to fit", where="--optimum-of", do="Add sizes.")
    return OPTIMUM_ND if all(varies.values()) else OPTIMUM_N if varies["n"] else OPTIMUM_D


def lines(part: dict[str, Any]) -> list[str]:
    """The optima as plain text."""
    found = [
        f"optima of {part['column']}: {len(part['cells'])} (n, d) with one, {len(part['refused'])} refused; in "
        f"brackets the values tried whose loss is within {part['near']:.2%} of the best"
    ]
    for cell in part["cells"][:SHOWN_CELLS]:
        low, high = cell["near_range"]
        found.append(
            f"  n = {cell['n']:.4g}, d = {cell['d']:.4g}: {cell['value']:.4g} [{low:.4g}, {high:.4g}] "
            f"of {cell['values']} tried, loss {cell['loss']:.5f}"
        )
    for cell in part["refused"][:SHOWN_CELLS]:
        found.append(f"  n = {cell['n']:.4g}, d = {cell['d']:.4g}: refused: {cell['reason']}")
    left = sum(max(len(part[key]) - SHOWN_CELLS, 0) for key in ("cells", "refused"))
    return found + ([f"  and {left} more (all in the fit file)"] if left else [])
