"""All approaches side by side on one table, with intervals from one set of pseudo-tables, and how far they disagree."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.approaches import envelope, interpolate, isoflop
from lm.scaling.approaches.curve import PARABOLA, Curve
from lm.scaling.approaches.envelope import Curves
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import Objective
from lm.scaling.fitting.prepare import prepare
from lm.scaling.fitting.quantities import quantities
from lm.scaling.fitting.solve import minimise
from lm.scaling.laws.base import Law
from lm.scaling.laws.joint import GAMMA, KAPLAN_JOINT
from lm.scaling.laws.power import HOFFMANN, TIED
from lm.scaling.read import Points
from lm.scaling.words import entry, span

Array = np.ndarray

RESAMPLES = 500
FAR = 10.0  # times the largest compute: where disagreement is measured
PATH = 25  # computes from the smallest to the far one, for a figure
SURFACES: tuple[Law, ...] = (TIED, GAMMA, KAPLAN_JOINT)  # beside Hoffmann's, the reference
REFERENCE = f"3: {HOFFMANN.name}"
FEW = 0.05
# Of 100 planted IsoFLOP tables of 54 points and 70 of 126, noise .2 %: N* at ten times the largest budget.
COVERAGE = (
    "on planted tables they held the truth in 90 to 91 % (surface), 87 to 91 % (interpolation), 83 to 90 % (parabola)"
)
LEAST_LEFT = 0.1  # of a residual's variance: a point that the fit runs through would get any residual


@dataclasses.dataclass(frozen=True)
class _Answers:
    """What one approach says of each pseudo-table: log N* = constant + slope log C, each [2 + R].

    Row 0 is of the table itself, row 1 of the reference surface without noise, the rest of the draws. `log_loss`
    [2 + R, budgets] is of laws only.
    """

    slope: Array
    constant: Array
    log_loss: Array | None = None
    certified: bool | None = None
    lost: float = 0.0  # share of the minima that draws have not, or not among the sampled sizes

    def log_n(self, budgets: Sequence[float] | Array) -> Array:
        return self.constant[:, None] + self.slope[:, None] * np.log(budgets)


@dataclasses.dataclass(frozen=True)
class _Absent:
    reason: str


def why_not(found: Points, clusters: Array | None, objective: Objective, pins: Mapping[str, float]) -> str | None:
    """Why Hoffmann's surface cannot be fitted to the rows that are compared; None when it can."""
    ends = envelope.last_rows(found, clusters)
    try:
        prepare(ends, HOFFMANN, objective, pins)
    except UsageError as error:
        rows = "the rows" if ends is found else "the last row of each run"
        return f"{REFERENCE[3:]}, the reference, cannot be fitted to {rows}: {error.what}"
    return None


def parts(
    fitted: Fitted,
    clusters: Array | None,
    budgets: Sequence[float],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    compared: bool = True,
) -> dict[str, dict[str, Any]]:
    """The comparison and the approaches that are made for it alone: `envelope` (of curves), `interpolation`, `compare`.

    Without the last where nothing is `compared`.

    Raises:
      UsageError: as `analyse`.
    """
    found, made = fitted.found, {}
    if clusters is not None and envelope.why_not(found, clusters) is None:
        made["envelope"] = envelope.analyse(found, clusters, seed=seed, resamples=resamples)
    made["interpolation"] = interpolate.analyse(envelope.last_rows(found, clusters), seed=seed)
    if not compared:
        return made
    return made | {"compare": analyse(fitted, clusters, budgets, seed=seed, resamples=resamples)}


# Where the data pin no exponent, an optimum runs away: an infinite value is then the answer, not a mistake.
@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def analyse(
    fitted: Fitted,
    clusters: Array | None,
    budgets: Sequence[float],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    laws: Sequence[Law] = SURFACES,
) -> dict[str, Any]:
    """{approaches, absent, disagreement, path, points, resampling, ...} at `budgets` (FLOP); intervals are 95 %.

    `laws` are fitted beside Hoffmann's, the reference. `fitted` gives points, objective and, where it is Hoffmann's
    law, its pins. `clusters` [points] are runs: where each is a training curve, approach 1 reads the curves and all
    others the last row of each run.
    Every approach is applied to the same pseudo-tables: Hoffmann's fitted surface with its residuals at random signs
    (wild bootstrap of Davidson and Flachaire 2008, residuals over 1 - leverage: each point keeps its own size of noise,
    which small runs have more of). A training curve moves as a whole, with the residual of its last row; clusters that
    are no curves have one sign each. An interval is the estimate plus the spread of the draws about the same approach's
    answer for the surface without noise: approaches that disagree about the surface keep their own centres.

    Raises:
      UsageError: Hoffmann's surface cannot be fitted to the points.
    """
    found = fitted.found
    reason = envelope.why_not(found, clusters)
    curves = envelope.read_curves(found, clusters) if reason is None and clusters is not None else None
    ends = found if curves is None else found.subset(curves.ends)
    objective = fitted.problem.objective
    if fitted.law is HOFFMANN and curves is None:
        surface = fitted
    else:
        surface = fit_points(ends, HOFFMANN, objective, fitted.pins if fitted.law is HOFFMANN else {})
    stack = _pseudo_tables(surface, None if curves is not None else clusters, resamples, seed)
    per_nd = ends.flops_per_nd
    answers: dict[str, _Answers | _Absent] = {"1: envelope": _Absent(str(reason))}
    if curves is not None:
        answers["1: envelope"] = _envelope(curves, stack)
    for curve in (PARABOLA, interpolate.AKIMA):
        usable = np.array([part["budget"] for part in isoflop.analyse(ends, seed=seed, curve=curve)["budgets"]])
        for key in ("n", "d"):
            answers[f"2: {curve.name} in {key.upper()}"] = _minima(ends, usable, curve, key, stack, per_nd)
    answers[REFERENCE] = _surface(surface, stack, budgets, per_nd)
    for law in laws:
        try:
            fit = fit_points(ends, law, objective, {})
        except UsageError as error:
            answers[f"3: {law.name}"] = _Absent(error.what)
        else:
            answers[f"3: {law.name}"] = _surface(fit, stack, budgets, per_nd)
    present = {name: answer for name, answer in answers.items() if isinstance(answer, _Answers)}
    far = FAR * float(ends.c.max())
    path = np.geomspace(ends.c.min(), far, PATH)
    return {
        "reference": REFERENCE,
        "objective": objective.name,
        "points": len(ends),
        "rows": "the last row of each run" if curves is not None else "all rows",
        "resamples": resamples,
        "resampling": "run" if curves is not None else "point" if clusters is None else "cluster",
        "coverage": COVERAGE,
        "flops_per_nd": per_nd,
        "approaches": [
            _row(name, answer, present[REFERENCE], budgets, far, path, per_nd) for name, answer in present.items()
        ],
        "absent": [
            {"approach": name, "reason": answer.reason}
            for name, answer in answers.items()
            if isinstance(answer, _Absent)
        ],
        "disagreement": _disagreement(present, far),
        "path": path.tolist(),
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The comparison as text."""
    found = [
        f"all approaches, {part['points']} points ({part['rows']}), {part['objective']}; 95 % intervals from the same "
        f"{part['resamples']} pseudo-tables (residuals of {part['reference'][3:]}, a sign a {part['resampling']})",
        f"  the intervals are a little narrow: {part['coverage']}",
    ]
    for row in part["approaches"]:
        mark = "" if row["certified"] in (True, None) else "   NOT CERTIFIED"
        if row["lost"] > FEW:
            mark += f"   ({row['lost']:.0%} of the draws' minima are not among the sizes: the intervals are too narrow)"
        found.append(f"  {row['approach']:<20} N* ~ C^a, a = {entry(row['a'])}{mark}")
        for at in row["optima"]:
            loss = "" if at["loss"] is None else f", loss {entry(at['loss'])}"
            found.append(
                f"    C = {at['budget']:.4g}: N* {entry(at['n'])}, "
                f"tokens/parameter {entry(at['tokens_per_parameter'])}{loss}"
            )
    found += [f"  {row['approach']:<20} absent: {row['reason']}" for row in part["absent"]]
    spread = part["disagreement"]
    if spread["factor"] is None:
        return [*found, "  disagreement: no approach gives a finite N*"]
    found.append(
        f"  disagreement at {spread['budget']:.4g} FLOP: N* from {spread['lowest']['n']:.4g} "
        f"({spread['lowest']['approach']}) to {spread['highest']['n']:.4g} ({spread['highest']['approach']}), "
        f"a factor of {spread['factor']:.3g}"
    )
    for row in part["approaches"]:
        if row["ratio"] is not None:
            differs = {True: "differs", False: "does not differ", None: "cannot be told apart"}[row["differs"]]
            found.append(
                f"    {row['approach']:<20} N* over that of {part['reference'][3:]}: "
                f"{span(row['ratio']['value'], row['ratio']['interval'])}: {differs}"
            )
    return found


def _pseudo_tables(surface: Fitted, clusters: Array | None, resamples: int, seed: int) -> Array:
    """Log losses [2 + R, points]: the table's own, the surface's, and draws."""
    random = np.random.default_rng(seed)
    problem = surface.problem
    (predicted,), (jacobian,) = problem.law.log_loss_and_jacobian(surface.theta[None], problem.logs)
    basis, _ = np.linalg.qr(jacobian[problem.free].T)
    left = np.maximum(1 - np.sum(basis**2, axis=1), LEAST_LEFT)
    groups = np.arange(len(predicted)) if clusters is None else clusters
    signs = random.choice([-1.0, 1.0], size=(resamples, groups.max() + 1))[:, groups]
    drawn = predicted + signs * (problem.log_loss - predicted) / left
    return np.concatenate([problem.log_loss[None], predicted[None], drawn])


def _envelope(curves: Curves, stack: Array) -> _Answers | _Absent:
    shift = stack - stack[0]
    (slope, constant), _ = envelope.allocation(curves, envelope.winners(curves, shift))
    if not np.isfinite(slope[0]):
        return _Absent("hardly any compute has its lowest loss at a size between others")
    return _Answers(slope, constant)


def _minima(found: Points, budgets: Array, curve: Curve, key: str, stack: Array, per_nd: float) -> _Answers | _Absent:
    if len(budgets) < 2:
        return _Absent(f"{len(budgets)} usable budget{'s' * (len(budgets) != 1)}: an exponent needs two")
    x = np.log(found.variable(key))
    places = np.empty((len(stack), len(budgets)))
    for k, rows in enumerate(isoflop.rows_of(found, budgets)):
        place = curve.minima(x[rows], np.exp(stack[:, rows]))[0]
        places[:, k] = np.where((place > x[rows].min()) & (place < x[rows].max()), place, np.nan)
    slope, constant = isoflop.power_law(np.log(budgets), places)
    lost = float(np.mean(np.isnan(places[2:]))) if len(places) > 2 else 0.0
    if key == "d":
        slope, constant = 1 - slope, -math.log(per_nd) - constant
    return _Answers(slope, constant, lost=lost)


def _surface(fit: Fitted, stack: Array, budgets: Sequence[float], per_nd: float) -> _Answers:
    start = np.repeat(fit.theta[None], len(stack), 0)
    theta = minimise(dataclasses.replace(fit.problem, log_loss=stack, weights=None), start).theta
    values = quantities(fit.law, fit.natural(theta), budgets, per_nd)
    slope = values["a"]
    with np.errstate(divide="ignore", invalid="ignore"):
        n, _ = fit.law.allocate(fit.natural(theta), budgets[0], per_nd)
        constant = np.log(n) - slope * math.log(budgets[0])
        log_loss = np.log(np.stack([values[f"loss@{budget:.6g}"] for budget in budgets], axis=1))
    return _Answers(slope, constant, log_loss, fit.certificate.passed)


def _row(
    name: str,
    answer: _Answers,
    reference: _Answers,
    budgets: Sequence[float],
    far: float,
    path: Array,
    per_nd: float,
) -> dict[str, Any]:
    log_n, log_c = answer.log_n(budgets), np.log(budgets)
    log_d = log_c - math.log(per_nd) - log_n
    optima = []
    for k, budget in enumerate(budgets):
        columns = {"n": log_n[:, k], "d": log_d[:, k], "tokens_per_parameter": log_d[:, k] - log_n[:, k]}
        shown: dict[str, Any] = {key: _entry(column, log=True) for key, column in columns.items()}
        loss = None if answer.log_loss is None else _entry(answer.log_loss[:, k], log=True)
        optima.append({"budget": float(budget), **shown, "loss": loss})
    along = answer.log_n(path)
    bands = [_entry(along[:, k], log=True) for k in range(len(path))]
    ratio, differs = None, None
    if answer is not reference:
        ratio = _entry((answer.log_n([far]) - reference.log_n([far]))[:, 0], log=True)
        ends = ratio["interval"]
        differs = None if ends is None or None in ends else not ends[0] <= 1 <= ends[1]
    return {
        "approach": name,
        "certified": answer.certified,
        "a": _entry(answer.slope),
        "optima": optima,
        "lost": answer.lost,
        "ratio": ratio,
        "differs": differs,
        "n_path": [band["value"] for band in bands],
        "band": [band["interval"] for band in bands],
    }


def _disagreement(present: dict[str, _Answers], far: float) -> dict[str, Any]:
    at = {name: float(np.exp(answer.log_n([far])[0, 0])) for name, answer in present.items()}
    at = {name: n for name, n in at.items() if 0 < n < math.inf}
    if not at:
        return {"budget": far, "lowest": None, "highest": None, "factor": None}
    low, high = min(at, key=at.__getitem__), max(at, key=at.__getitem__)
    return {
        "budget": far,
        "lowest": {"approach": low, "n": at[low]},
        "highest": {"approach": high, "n": at[high]},
        "factor": _finite(at[high] / at[low]),
    }


def _entry(column: Array, *, log: bool = False) -> dict[str, Any]:
    """The value of row 0, with the spread of the draws about row 1; no interval where half of the draws are lost."""
    value, exact, draws = column[0], column[1], column[2:]
    known = draws[np.isfinite(draws)]
    ends = None
    if len(known) > len(draws) / 2 and np.isfinite(exact):
        ends = value + np.quantile(known, [0.025, 0.975]) - exact
    if log:
        value, ends = np.exp(value), None if ends is None else np.exp(ends)
    return {"value": _finite(value), "interval": None if ends is None else [_finite(end) for end in ends]}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
