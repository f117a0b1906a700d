"""The tune stage: the best learning rate of each size, and the rule that carries it to every other size."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lm.base.errors import RunError
from lm.scaling.approaches.setting import Interpolated, interpolate


@dataclasses.dataclass(frozen=True)
class Rule:
    """peak_lr = coefficient * N^exponent, N in total parameters."""

    coefficient: float
    exponent: float
    text: str

    def rate(self, n: float) -> float:
        """The peak learning rate for N parameters, to three significant digits."""
        return float(f"{self.coefficient * n**self.exponent:.3g}")


def fit_rule(rows: Sequence[dict[str, Any]]) -> Rule:
    """Reads the rule off measured cells, rows of {"n", "peak_lr", "loss"}.

    Each size's optimum is the vertex of a parabola in log rate through its best rate and that one's two neighbours,
    kept between them; a best rate at the edge of those tried stands for itself, and the rule says so. A power law in N
    is fitted through the optima of three or more sizes, and kept only when its exponent is at least two standard errors
    from 0: otherwise the rule is one rate, their geometric mean.

    Raises:
      RunError: no cell of the stage finished.
    """
    if not rows:
        raise RunError("no cell of the tune stage finished", where="tune", do="See the failures above.")
    by_size = [[row for row in rows if row["n"] == n] for n in sorted({row["n"] for row in rows})]
    optima = [_optimum(size) for size in by_size]
    log_n = np.log([size[0]["n"] for size in by_size])
    log_rate = np.log([optimum.at for optimum in optima])
    edges = [size[0]["n"] for size, optimum in zip(by_size, optima, strict=True) if optimum.refusal]
    note = f"; best rate at the edge of those tried for N = {', '.join(f'{n:,}' for n in edges)}" if edges else ""
    exponent, error = _slope(log_n, log_rate)
    if abs(exponent) < 2 * error:
        rate = float(np.exp(log_rate.mean()))
        text = f"peak_lr = {rate:.3g} for every size (exponent in N {exponent:+.2f} +- {error:.2f}, not told from 0)"
        return Rule(rate, 0.0, text + note)
    coefficient = float(np.exp(log_rate.mean() - exponent * log_n.mean()))
    return Rule(coefficient, exponent, f"peak_lr = {coefficient:.3g} N^{exponent:.3f} (+- {error:.3f}){note}")


def _optimum(rows: Sequence[dict[str, Any]]) -> Interpolated:
    rates, losses = np.array(sorted((row["peak_lr"], row["loss"]) for row in rows)).T
    return interpolate(rates, losses)


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least-squares slope and its standard error (infinite below three points)."""
    if len(x) < 3:
        return 0.0, float("inf")
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residual = y - y.mean() - slope * centred
    return slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred)))
