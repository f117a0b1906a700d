"""One table, one law, one answer with its certificate, intervals and warnings: what `fit.json` holds."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.approaches import isoflop
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval, Resampling
from lm.scaling.fitting.certificate import Certificate
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import HUBER, Array, Objective, objective_named
from lm.scaling.fitting.quantities import quantities
from lm.scaling.laws import law_named
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN
from lm.scaling.result import FitResult

if TYPE_CHECKING:
    import pandas

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
    u: str | None = None,
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

    Columns are named by `n` (parameters), `d` (tokens), `c` (FLOP; None: 6 n d), `loss` (nats/token) and, for laws of
    repeated data, `u` (distinct training tokens); `budgets` are in FLOP (default: the largest fitted one and ten times
    it).

    Raises:
      UsageError: anything wrong with the table or the request.
    """
    found = read.points(table, read.Columns(n, d, c, loss, u), where)
    clusters = None if cluster is None else read.cluster_codes(found.table, cluster)
    kind = resampling or (Resampling.POINT if clusters is None else Resampling.CLUSTER)
    if (kind is Resampling.CLUSTER) != (clusters is not None):
        raise UsageError("a bootstrap by cluster and --cluster COL need each other", where="--resampling")
    spec = Bootstrap(bootstrap, kind, seed, clusters)
    for budget in budgets:
        if not 0 < budget < math.inf:
            raise UsageError(f"a budget of {budget:g} FLOP", where="--budget", do="Give a positive number.")
    asked = tuple(budgets) or (float(found.c.max()), 10 * float(found.c.max()))
    measure = objective_named(objective)
    other_laws = [law_named(name, "--others") for name in others]
    fitted = fit_points(found, law_named(law), measure, pins or {})
    result = _summary(fitted, spec, interval, asked)
    curves = isoflop.analyse(found, seed=seed)
    beside = [_summary(fit_points(found, other, measure, {}), spec, interval, asked).to_json() for other in other_laws]
    for other in beside:
        for shared in ("isoflop", "others", "checks", "bootstrap_samples", "provenance"):
            del other[shared]
    import pandas
    import scipy

    provenance = {
        "table_sha256": read.sha256_table(table),
        "rows": len(table),
        "command": command,
        "where": where,
        "columns": {"n": n, "d": d, "c": c, "loss": loss, "u": u, "cluster": cluster},
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


def _summary(fitted: Fitted, spec: Bootstrap, kind: Interval, budgets: Sequence[float]) -> FitResult:
    found, law, problem, theta, proof = fitted.found, fitted.law, fitted.problem, fitted.theta, fitted.certificate
    estimate, pins = fitted.estimate, fitted.pins
    per_nd = found.flops_per_nd
    values = {name: float(column) for name, column in quantities(law, estimate, budgets, per_nd).items()}
    samples, errors, intervals, lost = np.empty((0, len(theta))), dict.fromkeys(values), dict.fromkeys(values), 0.0
    if spec.resamples:
        drawn = bootstrap.draw(problem, theta, spec)
        samples = fitted.natural(drawn.theta)
        lost = 1 - float(np.mean(drawn.converged))
        columns = quantities(law, samples, budgets, per_nd)
        left_out = None
        if kind is Interval.BCA:
            left_out = quantities(law, fitted.natural(bootstrap.jackknife(problem, theta, spec)), budgets, per_nd)
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
        objective=_named(problem.objective) | {"value": proof.objective},
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
        checks={},
        bootstrap_samples=kept.tolist(),
    )


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


def _named(objective: Objective) -> dict[str, Any]:
    return {"name": objective.name, "delta": _finite(objective.delta), "over": objective.over}


def _plain(proof: Certificate) -> dict[str, Any]:
    return {name: list(part) if isinstance(part, tuple) else part for name, part in dataclasses.asdict(proof).items()}
