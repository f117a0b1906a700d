"""One table, one law, one answer with its certificate, intervals and warnings: what `fit.json` holds."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.scaling import bootstrap, isoflop, read
from lm.scaling.bootstrap import Bootstrap, Interval, Resampling
from lm.scaling.certificate import Certificate, certify
from lm.scaling.laws import HOFFMANN, Law, law_named
from lm.scaling.result import FitResult
from lm.scaling.solve import HUBER, Array, Objective, Problem, minimise, objective_named

if TYPE_CHECKING:
    import pandas

COLLINEAR = 0.99
KEPT_SAMPLES = 400
MANY_POINTS = 100
COVERAGE_OF_FEW = {  # measured by `coverage.measure` on planted laws of 15, 20 and 40 points
    Resampling.POINT: "such 95 % intervals held the truth in 94 to 99.5 % of planted tables (under 40 points too wide)",
    Resampling.RESIDUAL: "such 95 % intervals held the truth in only 86 to 94 % of planted tables: they are too narrow",
    Resampling.CLUSTER: "how often intervals by cluster hold the truth is not measured for so few",
}
NOTHING = 1e-3  # of the least loss: a constant below it is as good as 0


def fit_table(
    table: "pandas.DataFrame",
    *,
    n: str | None = "params_total",
    d: str | None = "tokens",
    c: str | None = "flops_matmul",
    loss: str = "loss",
    where: str | None = None,
    law: str = HOFFMANN.name,
    objective: str = HUBER.name,
    pins: Mapping[str, float] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    cluster: str | None = None,
    resampling: Resampling | None = None,
    interval: Interval = Interval.PERCENTILE,
    budgets: Sequence[float] = (),
    others: Sequence[str] = (),
    command: str = "",
) -> FitResult:
    """Fits a law to the rows of `table`, with IsoFLOP optima beside it and `others` fitted the same way.

    Columns are named by `n` (parameters), `d` (tokens), `c` (FLOP; None: 6 n d) and `loss` (nats/token); `budgets` are
    in FLOP (default: the largest fitted one and ten times it).

    Raises:
      UsageError: anything wrong with the table or the request.
    """
    found = read.points(table, read.Columns(n, d, c, loss), where)
    clusters = None if cluster is None else read.cluster_codes(found.table, cluster)
    kind = resampling or (Resampling.POINT if clusters is None else Resampling.CLUSTER)
    if (kind is Resampling.CLUSTER) != (clusters is not None):
        raise UsageError("a bootstrap by cluster and --cluster COL need each other", where="--resampling")
    spec = Bootstrap(bootstrap, kind, seed, clusters)
    for budget in budgets:
        if not 0 < budget < math.inf:
            raise UsageError(f"a budget of {budget:g} FLOP", where="--budget", do="Give a positive number.")
    asked = tuple(budgets) or (float(found.c.max()), 10 * float(found.c.max()))
    other_laws = [law_named(name, "--others") for name in others]
    result = _fit(found, law_named(law), objective_named(objective), dict(pins or {}), spec, interval, asked)
    curves = isoflop.analyse(found, seed=seed)
    beside = [
        _fit(found, other, objective_named(objective), {}, spec, interval, asked).to_json() for other in other_laws
    ]
    for other in beside:
        for shared in ("isoflop", "others", "bootstrap_samples", "provenance"):
            del other[shared]
    import pandas
    import scipy

    provenance = {
        "table_sha256": read.sha256_table(table),
        "rows": len(table),
        "command": command,
        "where": where,
        "columns": {"n": n, "d": d, "c": c, "loss": loss, "cluster": cluster},
        "conventions": list(found.conventions),
        "flops_per_nd": found.flops_per_nd,
        "pins": dict(pins or {}),
        "seed": seed,
        "bootstrap": {"kind": kind.value, "resamples": bootstrap, "interval": interval.value, "level": 0.95},
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "pandas": pandas.__version__,
        },
    }
    return dataclasses.replace(result, isoflop=curves, others=beside, provenance=provenance)


def prepare(
    found: read.Points, law: Law, objective: Objective, pins: Mapping[str, float]
) -> tuple[Problem, dict[str, float], Array]:
    """The centred problem, its centre, and starts [S, P] that hold the pinned values.

    Raises:
      UsageError: an unknown or impossible pin, too few points, or a design that cannot tell the exponents apart.
    """
    for name, value in pins.items():
        if name not in law.parameters:
            raise UsageError(f"{law.name} has no parameter '{name}'", where="--pin", do=nearest(name, law.parameters))
        if not 0 < value < math.inf:
            raise UsageError(f"{name}={value:g} is not positive", where="--pin")
        if name in law.constants and value >= found.loss.min():
            raise UsageError(
                f"{name}={value:g} is not below the smallest loss ({found.loss.min():.6g}), which it is the floor of",
                where="--pin",
                do="Pin a smaller value.",
            )
    free = np.array([name not in pins for name in law.parameters])
    if not free.any():
        raise UsageError("all parameters are pinned: nothing is left to fit", where="--pin", do="Leave one free.")
    if len(found) <= free.sum():
        raise UsageError(
            f"{len(found)} points for {free.sum()} parameters of '{law.name}'",
            where="table",
            do="Add runs, or fit a law with fewer parameters.",
        )
    _check_design(found, law)
    raw = {"n": np.log(found.n), "d": np.log(found.d), "c": np.log(found.c)}
    # A pinned coefficient is a number at N = 1: it stays fixed only where the logarithms are not centred.
    coefficients = {term.coefficient for term in law.terms if term.powers}
    centre = {name: 0.0 if coefficients & set(pins) else float(raw[name].mean()) for name in law.variables}
    logs = {name: raw[name] - centre[name] for name in law.variables}
    middle = {name: raw[name] - raw[name].mean() for name in law.variables}
    starts = law.to_inner(
        law.to_natural(law.starts(middle, found.loss), {name: float(raw[name].mean()) for name in law.variables}),
        centre,
    )
    low, high = law.bounds(found.loss)
    shift = 60.0 * max([0.0, *(raw[name].mean() - centre[name] for name in law.variables)])
    for k, name in enumerate(law.parameters):
        if name in coefficients:
            low[k], high[k] = low[k] - shift, high[k] + shift
        if name in pins:
            starts[:, k] = np.log(pins[name]) if name in coefficients else pins[name]
            low[k] = high[k] = starts[0, k]
    return Problem(law, objective, logs, np.log(found.loss), low, high, free), centre, np.unique(starts, axis=0)


def _fit(
    found: read.Points,
    law: Law,
    objective: Objective,
    pins: dict[str, float],
    spec: Bootstrap,
    kind: Interval,
    budgets: Sequence[float],
) -> FitResult:
    problem, centre, starts = prepare(found, law, objective, pins)
    solution = minimise(problem, starts, far=True)
    best = int(solution.value.argmin())
    theta = solution.theta[best]
    proof = certify(problem, solution, best, starts)
    estimate = law.to_natural(theta, centre)
    per_nd = found.flops_per_nd
    values = {name: float(column) for name, column in quantities(law, estimate, budgets, per_nd).items()}
    samples, errors, intervals, lost = np.empty((0, len(theta))), dict.fromkeys(values), dict.fromkeys(values), 0.0
    if spec.resamples:
        drawn = bootstrap.draw(problem, theta, spec)
        samples = law.to_natural(drawn.theta, centre)
        lost = 1 - float(np.mean(drawn.converged))
        columns = quantities(law, samples, budgets, per_nd)
        left_out = None
        if kind is Interval.BCA:
            left_out = quantities(
                law, law.to_natural(bootstrap.jackknife(problem, theta, spec), centre), budgets, per_nd
            )
        for name, column in columns.items():
            errors[name] = _finite(np.std(column, ddof=1)) if spec.resamples > 1 else None
            intervals[name] = [
                _finite(end)
                for end in bootstrap.interval(column, values[name], None if left_out is None else left_out[name], kind)
            ]
    residual = problem.log_loss - law.log_loss(theta, problem.logs)
    lowest = {name: min([values[name], *(intervals[name] or ())]) for name in law.constants if name not in pins}
    absent = [name for name, low in lowest.items() if low < NOTHING * found.loss.min()]
    rounded = [name for name in law.exponents if name in pins and pins[name] == round(pins[name], 2)]
    warnings = [
        *(f"THE FIT IS NOT CERTIFIED: {failure}" for failure in proof.failures),
        *(f"{name} is pinned to two digits: optima far away move by half with the third" for name in rounded),
        *found.warnings,
        *_fit_warnings(found, absent, lost, spec.kind),
    ]
    kept = samples[np.linspace(0, len(samples), min(len(samples), KEPT_SAMPLES), endpoint=False).astype(int)]
    return FitResult(
        law=law.name,
        formula=law.formula,
        objective={"name": objective.name, "delta": _finite(objective.delta), "value": proof.objective},
        points=len(found),
        parameters={name: values[name] for name in law.parameters},
        standard_errors={name: errors[name] for name in law.parameters},
        intervals={name: intervals[name] for name in law.parameters},
        derived=_derived(law, values, intervals, budgets, per_nd),
        certificate=_plain(proof),
        warnings=warnings,
        provenance={},
        noise=_noise(found, residual, int(problem.free.sum())),
        fitted_range={
            name: [float(column.min()), float(column.max())]
            for name, column in (("n", found.n), ("d", found.d), ("c", found.c), ("loss", found.loss))
        },
        isoflop={},
        others=[],
        bootstrap_samples=kept.tolist(),
    )


def quantities(law: Law, parameters: Array, budgets: Sequence[float], flops_per_nd: float) -> dict[str, Array]:
    """All that gets an interval: the parameters [..., P] by name and, by law, exponents and optima at `budgets`."""
    found = {name: parameters[..., k] for k, name in enumerate(law.parameters)}
    if not law.allocates:
        return found
    alpha, beta = (
        found[next(term.powers[0][1] for term in law.terms if term.powers and term.powers[0][0] == variable)]
        for variable in ("n", "d")
    )
    found |= {"a": beta / (alpha + beta), "b": alpha / (alpha + beta)}
    centred = law.to_inner(parameters, {})
    for budget in budgets:
        # Where the data pin no exponent, the optimum runs away: an infinite value is then the answer, not a mistake.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            n, d = law.allocate(parameters, budget, flops_per_nd)
            found |= {
                f"n@{budget:.6g}": n,
                f"d@{budget:.6g}": d,
                f"tokens_per_parameter@{budget:.6g}": d / n,
                f"loss@{budget:.6g}": np.exp(_pointwise(law, centred, np.log(n), np.log(d))),
            }
    return found


def _pointwise(law: Law, theta: Array, log_n: Array, log_d: Array) -> Array:
    """The log loss [...] where each parameter vector [..., P] has a point of its own."""
    return law.log_loss(theta, {"n": log_n[..., None], "d": log_d[..., None]})[..., 0]


def _derived(
    law: Law, values: Mapping[str, float], intervals: Mapping[str, Any], budgets: Sequence[float], flops_per_nd: float
) -> dict[str, Any]:
    if not law.allocates:
        return {}

    def entry(name: str) -> dict[str, Any]:
        return {"value": _finite(values[name]), "interval": intervals[name]}

    optimum = [
        {
            "budget": float(budget),
            **{key: entry(f"{key}@{budget:.6g}") for key in ("n", "d", "tokens_per_parameter", "loss")},
        }
        for budget in budgets
    ]
    return {"a": entry("a"), "b": entry("b"), "flops_per_nd": flops_per_nd, "optimum": optimum}


def _check_design(found: read.Points, law: Law) -> None:
    for variable in law.variables:
        if np.ptp(np.log(getattr(found, variable))) < 1e-6:
            raise UsageError(
                f"every run has the same {variable}: its exponent is not in the data",
                where="table",
                do="Fit a law that does not use it.",
            )
    if not {"n", "d"} <= set(law.variables):
        return
    correlation = float(np.corrcoef(np.log(found.n), np.log(found.d))[0, 1])
    if abs(correlation) > COLLINEAR:
        design = "one compute budget" if correlation < 0 else "a fixed ratio of tokens to parameters"
        raise UsageError(
            f"log N and log D have correlation {correlation:.4f} ({design}): their exponents cannot be told apart",
            where="table",
            do="Add runs off that line, or fit one variable: --law saturating_n.",
        )


def _fit_warnings(found: read.Points, absent: Sequence[str], lost: float, kind: Resampling) -> list[str]:
    warnings = [
        f"{name} not identified: its interval reaches 0; extrapolations hang on it (pin it with --pin {name}=...)"
        for name in absent
    ]
    if lost > 0.01:
        verdict = ": the intervals are not to be trusted" if lost > 0.05 else ""
        warnings.append(f"{lost:.1%} of the resamples did not converge{verdict}")
    if len(found) < MANY_POINTS:
        warnings.append(f"{len(found)} points: {COVERAGE_OF_FEW[kind]}")
    if np.unique(np.round(np.log(found.c), 2)).size == 1:
        warnings.append("all runs have one compute budget: nothing here says how the optimum moves")
    return warnings


def _noise(found: read.Points, residual: Array, parameters: int) -> dict[str, float | None]:
    freedom = len(residual) - parameters
    codes = read.repeats(found)
    counts = np.bincount(codes)
    inside = counts[codes] > 1
    seed_sd = None
    if inside.any():
        logs = np.log(found.loss)
        means = np.bincount(codes, logs) / counts
        seed_sd = float(np.sqrt(np.sum((logs - means[codes])[inside] ** 2) / np.sum(counts[counts > 1] - 1)))
    return {
        "residual_sd": float(np.sqrt(np.sum(residual**2) / freedom)),
        "freedom": float(freedom),
        "seed_sd": seed_sd,
        "repeated_points": float(inside.sum()),
    }


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _plain(proof: Certificate) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(proof).items()}
