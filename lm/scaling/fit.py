"""One table, one law, one answer with its certificate, intervals and warnings: what `fit.json` holds."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.approaches import compare as approaches
from lm.scaling.approaches import envelope, isoflop, setting
from lm.scaling.checks import counting as counting_rules
from lm.scaling.checks import coverage, identifiability, influence, parabola_bias, sensitivity
from lm.scaling.checks import holdout as hold_out
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval, Resampling
from lm.scaling.fitting.certificate import Certificate
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import HUBER, Array, Objective, objective_named
from lm.scaling.fitting.quantities import NEAR, quantities
from lm.scaling.laws import law_named
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN
from lm.scaling.planning.optimum import MOST, Surface, best, near_optimal
from lm.scaling.result import FitResult

if TYPE_CHECKING:
    import pandas

KEPT_SAMPLES = 400
EDGE = 1e-6  # of a logarithm: a range that ends so near to one parameter or token has no end
OUTLYING = 20.0  # robust standard deviations: of a thousand normal residuals the largest is at 3
LEAST_OUTLYING = 1e-3  # of a log loss: what rounding of a printed loss explains is no outlier
NORMAL_SD = 1.4826  # times the median size of normal residuals
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
    law: str | None = None,
    objective: str = HUBER.name,
    pins: Mapping[str, float] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    cluster: str | None = None,
    resampling: Resampling | None = None,
    interval: Interval = Interval.PERCENTILE,
    budgets: Sequence[float] = (),
    others: Sequence[str] = (),
    optimum_of: str | None = None,
    holdout: Sequence[str] | None = None,
    compare: bool = False,
    checks: bool = True,
    counting: bool = False,
    command: str = "",
) -> FitResult:
    """Fits a law to the rows of `table`, with IsoFLOP optima beside it and `others` fitted the same way.

    Columns are named by `n` (parameters), `d` (tokens), `c` (FLOP; None: 6 n d), `loss` (nats/token) and, for laws of
    repeated data, `u` (distinct training tokens); `budgets` are in FLOP (default: the largest fitted one and ten times
    it). `law` is Hoffmann's unless named; with `optimum_of`, the column of a setting, it is a law of that setting's
    optima, which are read off the losses and fitted in their place. `holdout` names laws to score by hold-out beside it
    (empty: a stated list of forms). `compare` sets all approaches side by side (see `approaches.compare`); for the
    envelope of training curves `cluster` names the run of each row.
    `checks` says how far the answer is identified, which rows it hangs on and how it moves with delta; `counting` fits
    the same runs under every counting rule (see `checks.counting`).

    Raises:
      UsageError: anything wrong with the table or the request.
    """
    found = read.points(table, read.Columns(n, d, c, loss, u), where)
    parts: dict[str, Any] = {}
    if optimum_of is not None:
        if cluster is not None:
            raise UsageError("optima are resampled by (n, d), not by a column", where="--cluster", do="Leave it out.")
        found, parts["setting"] = setting.optima(found, optimum_of)
    clusters = None if cluster is None else read.cluster_codes(found.table, cluster)
    kind = resampling or (Resampling.POINT if clusters is None else Resampling.CLUSTER)
    if (kind is Resampling.CLUSTER) != (clusters is not None):
        raise UsageError("a bootstrap by cluster and --cluster COL need each other", where="--resampling")
    spec = Bootstrap(bootstrap, kind, seed, clusters)
    for budget in budgets:
        if not found.flops_per_nd <= budget < MOST:
            bounds = f"{found.flops_per_nd:.3g}, which pay for one parameter and one token, to {MOST:g}"
            raise UsageError(f"a budget of {budget:g} FLOP", where="--budget", do=f"Give FLOP from {bounds}.")
    asked = tuple(budgets) or (float(found.c.max()), 10 * float(found.c.max()))
    measure = objective_named(objective)
    default = HOFFMANN if optimum_of is None else setting.law_of(found)
    chosen = default if law is None else law_named(law)
    other_laws = [law_named(name, "--others") for name in others]
    forms = [law_named(name, "--holdout") for name in holdout or ()]
    for flag, asked_for in (("--law", [chosen]), ("--others", other_laws), ("--holdout", forms)):
        for one in asked_for:
            if one.of_loss != (optimum_of is None):
                what = "a loss" if one.of_loss else "the optimum of a setting"
                raise UsageError(f"'{one.name}' is a law of {what}", where=flag, do="See --optimum-of.")
    if counting and not chosen.allocates:
        raise UsageError(f"'{chosen.name}' splits no budget into n and d", where="--counting", do="Fit --law hoffmann.")
    unlike = None
    if compare:
        if optimum_of is not None:
            raise UsageError("the approaches are compared on losses", where="--compare", do="Drop --optimum-of.")
        unlike = approaches.why_not(found, clusters, measure, (pins or {}) if chosen is HOFFMANN else {})
        if unlike is not None and envelope.why_not(found, clusters) is not None:
            raise UsageError(unlike, where="--compare", do="Drop --compare.")
    if u is not None and not any("u" in one.variables for one in (chosen, *other_laws, *forms)):
        raise UsageError(
            "no law that is fitted reads distinct tokens", where="--u", do="Fit --law repeated, or drop it."
        )
    fitted = fit_points(found, chosen, measure, pins or {})
    result = _summary(fitted, spec, interval, asked)
    if checks:
        parts |= _checks(fitted, result, max(asked), clusters)
    if counting:
        parts["counting"] = counting_rules.analyse(fitted, spec, interval, clusters, seed=seed)
    result.warnings.extend([f"no comparison: {unlike}"] if unlike else [])
    result.warnings.extend(said for part in parts.values() for said in part.pop("warnings", ()))
    ends = envelope.last_rows(found, clusters)
    curves = isoflop.analyse(ends, seed=seed) if optimum_of is None else {}
    if curves and (bias := parabola_bias.analyse(fitted, ends, curves)) is not None:
        parts["parabola_bias"] = bias
    if compare:
        draws = min(bootstrap, approaches.RESAMPLES)
        parts |= approaches.parts(fitted, clusters, asked, seed=seed, resamples=draws, compared=unlike is None)
    if holdout is not None:
        others_held = forms or hold_out.default_forms(chosen)
        parts["holdout"] = hold_out.analyse(found, chosen, others_held, measure, pins=pins or {}, spec=spec)
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
        "columns": {"n": n, "d": d, "c": c, "loss": loss, "u": u, "cluster": cluster, "optimum_of": optimum_of},
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
    return dataclasses.replace(
        result, isoflop=curves, others=beside, checks=result.checks | parts, provenance=provenance
    )


def _checks(fitted: Fitted, result: FitResult, budget: float, clusters: Array | None) -> dict[str, dict[str, Any]]:
    intervals = result.intervals | {"a": result.derived.get("a", {}).get("interval")}
    return {
        "identifiability": identifiability.analyse(fitted),
        "influence": influence.analyse(fitted, budget, intervals, clusters),
        "sensitivity": sensitivity.analyse(fitted, budget),
    }


def _summary(fitted: Fitted, spec: Bootstrap, kind: Interval, budgets: Sequence[float]) -> FitResult:
    found, law, problem, theta, proof = fitted.found, fitted.law, fitted.problem, fitted.theta, fitted.certificate
    estimate, pins = fitted.estimate, fitted.pins
    per_nd = found.flops_per_nd
    values = {name: float(column) for name, column in quantities(law, estimate, budgets, per_nd).items()}
    samples, errors, intervals, lost = np.empty((0, len(theta))), dict.fromkeys(values), dict.fromkeys(values), 0
    if spec.resamples:
        drawn = bootstrap.draw(problem, theta, spec)
        samples = fitted.natural(drawn.theta)
        lost = int(np.sum(~drawn.converged))
        columns = quantities(law, samples, budgets, per_nd)
        left_out = None
        if kind is Interval.BCA:
            left_out = quantities(law, fitted.natural(bootstrap.jackknife(problem, theta, spec)), budgets, per_nd)
        for name, column in columns.items():
            errors[name] = _finite(np.std(column, ddof=1))
            intervals[name] = [
                _finite(end)
                for end in bootstrap.interval(column, values[name], None if left_out is None else left_out[name], kind)
            ]
    lowest = {name: min([values[name], *(intervals[name] or ())]) for name in law.constants if name not in pins}
    absent = [name for name, low in lowest.items() if low < NOTHING * found.loss.min()]
    rounded = [name for name in law.exponents if name in pins and pins[name] == round(pins[name], 2)]
    few = coverage.analyse(fitted, spec, kind, lost / max(spec.resamples, 1))
    warnings = [
        *(f"THE FIT IS NOT CERTIFIED: {failure}" for failure in proof.failures),
        *(f"{name} is pinned to two digits: optima far away move by half with the third" for name in rounded),
        *found.warnings,
        *_unread_repetition(found, law),
        *_fit_warnings(found, absent, lost, spec.resamples),
        *_outliers(fitted),
        *_no_optimum(law, values, budgets, per_nd),
        *few.pop("warnings", ()),
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
        noise=fitted.noise,
        fitted_range={
            name: [float(column.min()), float(column.max())]
            for name, column in (
                ("n", found.n),
                ("d", found.d),
                ("tokens_per_parameter", found.d / found.n),
                ("c", found.c),
                ("u", found.u),
                ("loss", found.loss),
            )
            if column is not None
        },
        isoflop={},
        others=[],
        checks={"coverage": few} if few else {},
        bootstrap_samples=kept.tolist(),
    )


def _derived(
    law: Law, values: Mapping[str, float], intervals: Mapping[str, Any], budgets: Sequence[float], flops_per_nd: float
) -> dict[str, Any]:
    if not law.allocates:
        return {}

    def entry(name: str) -> dict[str, Any]:
        return {"value": _finite(values[name]), "interval": intervals[name]}

    estimate = np.array([values[name] for name in law.parameters])
    optimum = [
        {
            "budget": float(budget),
            **{key: entry(f"{key}@{budget:.6g}") for key in ("n", "d", "tokens_per_parameter", "loss")},
            "flat": _flat(Surface(law, estimate[None], flops_per_nd), budget),
        }
        for budget in budgets
    ]
    return {"a": entry("a"), "b": entry("b"), "flops_per_nd": flops_per_nd, "optimum": optimum}


def _flat(surface: Surface, budget: float) -> list[float | None]:
    """The least and the most parameters within 0.1 % of the optimal loss; None where that is one token or parameter."""
    low, high = (float(end[0]) for end in near_optimal(surface, best(surface, budget), NEAR))
    edge = float(surface.largest(budget))
    return [math.exp(low) if low > EDGE else None, math.exp(high) if high < edge - EDGE else None]


def _unread_repetition(found: read.Points, law: Law) -> list[str]:
    if found.u is None or "u" in law.variables:
        return []
    again = int((found.d > found.u * (1 + read.SAME)).sum())
    what = f"{again} of {len(found)} runs pass over tokens more than once: '{law.name}' has no term for repetition"
    return [what] if again else []


def _outliers(fitted: Fitted) -> list[str]:
    """The rows that lie further from the fit than any noise of the others would put them."""
    size = np.abs(fitted.problem.log_loss - fitted.law.log_loss(fitted.theta, fitted.problem.logs))
    # As many residuals as there are parameters may be 0: they say nothing of the noise.
    spread = NORMAL_SD * float(np.median(np.sort(size)[int(fitted.problem.free.sum()) :]))
    far = size > np.maximum(OUTLYING * spread, LEAST_OUTLYING)
    if not far.any():
        return []
    times = f", {size.max() / spread:.3g} robust standard deviations at most" if spread > 0 else ""
    return [f"far from the fit{times}: {read.rows(far, fitted.found.table)}; is the table right there?"]


def _no_optimum(law: Law, values: Mapping[str, float], budgets: Sequence[float], flops_per_nd: float) -> list[str]:
    if not law.allocates:
        return []
    edges = [(budget, math.log(values[f"n@{budget:.6g}"]), math.log(budget / flops_per_nd)) for budget in budgets]
    return [
        f"no optimum at {budget:.4g} FLOP between one parameter and one token under this fit"
        for budget, log_n, most in edges
        if not EDGE < log_n < most - EDGE
    ]


def _fit_warnings(found: read.Points, absent: Sequence[str], lost: int, resamples: int) -> list[str]:
    warnings = [
        f"{name} not identified: its interval reaches 0; extrapolations hang on it (pin it with --pin {name}=...)"
        for name in absent
    ]
    if lost > 0.01 * resamples:
        verdict = ": the intervals are not to be trusted" if lost > max(1, coverage.MOST_LOST * resamples) else ""
        warnings.append(f"{lost} of {resamples} resamples did not converge{verdict}")
    if np.unique(np.round(np.log(found.c), 2)).size == 1:
        warnings.append("all runs have one compute budget: nothing here says how the optimum moves")
    return warnings


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _named(objective: Objective) -> dict[str, Any]:
    return {"name": objective.name, "delta": _finite(objective.delta), "over": objective.over}


def _plain(proof: Certificate) -> dict[str, Any]:
    return {name: list(part) if isinstance(part, tuple) else part for name, part in dataclasses.asdict(proof).items()}
