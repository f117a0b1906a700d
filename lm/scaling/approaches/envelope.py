"""Approach 1 (Hoffmann et al. 2022, sec. 3.1): the lowest loss that any training curve reaches at each compute."""

import dataclasses
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.approaches.isoflop import power_law
from lm.scaling.read import Points, optional
from lm.scaling.words import entry

Array = np.ndarray

VALUES = 256  # of compute, log-spaced
FEWEST_RUNS, FEWEST_ROWS, FEWEST_VALUES = 3, 3, 8
WIDTH = 0.1  # of the smoothing, in log FLOP: steps this near are one to a power law
MOST_PLACES = 512
LATE = 0.85  # the last 15 % of a run, where Hoffmann et al. found their minima
SHOWN = 64


@dataclasses.dataclass(frozen=True)
class Curves:
    """The training curves of `runs`, smoothed, at `log_c` [G]: log losses [runs, G], infinite outside a curve.

    `log_n` and `log_c_end` are [runs]; `log_d` and `decayed` [runs, G]; `ends` [runs] are the rows where runs end.
    `decayed` is 1 where the learning rate had ended its decay, NaN where the table does not say.
    """

    log_c: Array
    log_n: Array
    log_c_end: Array
    log_loss: Array
    log_d: Array
    decayed: Array
    ends: Array

    @property
    def runs(self) -> int:
        return len(self.log_n)


def why_not(found: Points, clusters: Array | None) -> str | None:
    """Why the rows are no training curves, several rows of one size a run; None when they are."""
    if clusters is None:
        return "the rows are not known to be training curves: name the run of each with --cluster"
    runs = [np.flatnonzero(clusters == k) for k in range(clusters.max() + 1)]
    if any(np.ptp(np.log(found.n[rows])) > 1e-6 for rows in runs):
        return "the rows of one cluster differ in n: they are no training curve"
    long = sum(np.unique(found.c[rows]).size >= FEWEST_ROWS for rows in runs)
    if long < FEWEST_RUNS:
        return f"{long} of {len(runs)} runs have {FEWEST_ROWS} or more rows: at least {FEWEST_RUNS} are needed"
    return None


def last_rows(found: Points, clusters: Array | None) -> Points:
    """The points where training curves end, one a run; all points where they are no curves."""
    if clusters is None or why_not(found, clusters) is not None:
        return found
    order = np.lexsort([found.c, clusters])
    return found.subset(order[np.append(np.diff(clusters[order]) > 0, True)])


def read_curves(found: Points, clusters: Array) -> Curves:
    """Smooths each run's curve and interpolates it in log c at log-spaced compute that at least three runs reach.

    Raises:
      UsageError: the rows are no training curves, or no compute is reached by three runs.
    """
    reason = why_not(found, clusters)
    if reason:
        raise UsageError(reason, where="table", do="A row for each run and step; see `lm table --curves`.")
    codes = range(clusters.max() + 1)
    runs = [rows[np.argsort(found.c[rows])] for rows in (np.flatnonzero(clusters == k) for k in codes)]
    runs = [rows for rows in runs if np.unique(found.c[rows]).size >= FEWEST_ROWS]
    first, last = (np.sort(np.log([found.c[rows[at]] for rows in runs])) for at in (0, -1))
    low, high = first[FEWEST_RUNS - 1], last[-FEWEST_RUNS]
    if not low < high:
        raise UsageError(f"no compute is reached by {FEWEST_RUNS} runs", where="table", do="Add runs that overlap.")
    log_c = np.linspace(low, high, VALUES)
    decayed = _decayed(found)
    columns: dict[str, list[Array]] = {"log_loss": [], "log_d": [], "decayed": []}
    for rows in runs:
        own = np.log(found.c[rows])
        columns["log_loss"].append(np.interp(log_c, *smoothed(own, np.log(found.loss[rows])), np.inf, np.inf))
        columns["log_d"].append(np.interp(log_c, own, np.log(found.d[rows])))
        nearest = np.abs(own - log_c[:, None]).argmin(1)
        columns["decayed"].append(decayed[rows][nearest])
    stacked = {name: np.stack(column) for name, column in columns.items()}
    ends = np.array([rows[-1] for rows in runs])
    return Curves(log_c, np.log(found.n[ends]), np.log(found.c[ends]), **stacked, ends=ends)


def smoothed(x: Array, y: Array, width: float = WIDTH, most: int = MOST_PLACES) -> tuple[Array, Array]:
    """`y` over ascending `x` (each [points]) at x itself, or at `most` even places where there are more points.

    A line is fitted around each place with Gaussian weights: points further apart than `width` stay as they are.
    """
    at = x if len(x) <= most else np.linspace(x[0], x[-1], most)
    away = x - at[:, None]
    weights = np.exp(-0.5 * (away / width) ** 2)
    total, first, second = (np.sum(weights * away**power, axis=1) for power in (0, 1, 2))
    # A ridge of a hundredth of the width keeps a place with a single row near it from a slope of its own.
    tilted = weights * (second[:, None] + total[:, None] * (0.01 * width) ** 2 - first[:, None] * away)
    return at, tilted @ y / tilted.sum(axis=1)


def winners(curves: Curves, shift: Array) -> Array:
    """Which run has the lowest loss [R, G] when log losses move by `shift` [R, runs]; infinite takes a run out.

    -1 where the lowest is of the smallest or the largest size that reaches so far: no optimum is enclosed there.
    """
    found = np.empty((len(shift), len(curves.log_c)), int)
    for g, column in enumerate(curves.log_loss.T):
        there = np.flatnonzero(np.isfinite(column))
        losses, sizes = column[there] + shift[:, there], curves.log_n[there]
        known = np.isfinite(losses)
        best = losses.argmin(1)
        smallest = np.where(known, sizes, np.inf).min(1)
        largest = np.where(known, sizes, -np.inf).max(1)
        enclosed = (sizes[best] > smallest) & (sizes[best] < largest)
        found[:, g] = np.where(enclosed, there[best], -1)
    return found


def allocation(curves: Curves, winner: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Exponents and constants [R] of log N* and of log D* over log C, for winning runs [R, G]."""
    log_n = np.where(winner < 0, np.nan, curves.log_n[winner])
    log_d = np.where(winner < 0, np.nan, curves.log_d[winner, np.arange(winner.shape[1])])
    few = np.isfinite(log_n).sum(1) < FEWEST_VALUES
    log_n[few], log_d[few] = np.nan, np.nan
    return power_law(curves.log_c, log_n), power_law(curves.log_c, log_d)


def analyse(found: Points, clusters: Array, *, seed: int, resamples: int) -> dict[str, Any]:
    """{runs, values, used, exponents, points, shares, late, undecayed, warnings}: N*(C) and D*(C) from the envelope.

    `clusters` [points] are the runs of the rows. `used` of `values` log-spaced computes have their lowest loss at a
    size between others. Intervals are 95 % percentiles over `resamples` draws of whole runs.

    Raises:
      UsageError: the rows are no training curves.
    """
    curves = read_curves(found, clusters)
    winner = winners(curves, np.zeros((1, curves.runs)))
    used = np.flatnonzero(winner[0] >= 0)
    best = winner[0, used]
    drawn = np.random.default_rng(seed).multinomial(curves.runs, np.full(curves.runs, 1 / curves.runs), resamples)
    samples = allocation(curves, winners(curves, np.where(drawn > 0, 0.0, np.inf)))
    exponents = {}
    for name, (slope, constant), (slopes, _) in zip("ab", allocation(curves, winner), samples, strict=True):
        known = slopes[np.isfinite(slopes)]
        exponents[name] = {
            "value": _finite(slope[0]),
            "interval": np.quantile(known, [0.025, 0.975]).tolist() if len(known) > resamples / 2 else None,
            "coefficient": _finite(np.exp(constant[0])),
        }
    share = np.exp(curves.log_c[used] - curves.log_c_end[best])
    decayed = curves.decayed[best, used]
    undecayed = None if np.isnan(decayed).any() or not len(used) else float(np.mean(decayed < 1))
    shown = np.linspace(0, len(used) - 1, min(len(used), SHOWN)).astype(int)
    logs = (curves.log_c[used], curves.log_n[best], curves.log_d[best, used], curves.log_loss[best, used])
    return {
        "runs": curves.runs,
        "values": len(curves.log_c),
        "used": len(used),
        "exponents": exponents,
        "points": [[float(np.exp(column[k])) for column in logs] for k in shown],
        "shares": np.quantile(share, [0, 0.5, 1]).tolist() if len(used) else None,
        "late": float(np.mean(share >= LATE)) if len(used) else None,
        "undecayed": undecayed,
        "warnings": _warnings(len(used), len(curves.log_c), undecayed),
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis as text, warnings first."""
    found = [f"WARNING (approach 1): {warning}" for warning in part["warnings"]]
    found.append(
        f"approach 1, envelope of {part['runs']} training curves: {part['used']} of {part['values']} computes used"
    )
    found.append("  exponents: " + ", ".join(f"{name} = {entry(value)}" for name, value in part["exponents"].items()))
    if part["shares"]:
        low, middle, high = part["shares"]
        found.append(
            f"  the minima lie at {low:.0%} to {high:.0%} (median {middle:.0%}) of their run's compute; "
            f"{part['late']:.0%} of them in its last 15 %"
        )
    return found


def _decayed(found: Points) -> Array:
    """1, 0 or NaN [points]: column `decayed` where there is one, else whether `lr_fraction` is as low as it gets."""
    if "decayed" in found.table:
        return optional(found.table, "decayed")
    if "lr_fraction" in found.table:
        fraction = optional(found.table, "lr_fraction")
        return np.where(np.isnan(fraction), np.nan, fraction <= np.nanmin(fraction) + 1e-3)
    return np.full(len(found), np.nan)


def _warnings(used: int, values: int, undecayed: float | None) -> list[str]:
    found = []
    if undecayed is None:
        found.append("the table has no column 'decayed' or 'lr_fraction': minima before the end of decay are not told")
    elif undecayed > 0:
        found.append(
            f"{undecayed:.0%} of the minima are of runs whose learning rate had not decayed: such losses are too high"
        )
    if used < values:
        found.append(
            f"{values - used} of {values} computes have their lowest loss at the smallest or largest size that reaches "
            "so far: left out"
        )
    return found


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
