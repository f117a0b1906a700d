"""The same runs under every counting rule: what N, C and therefore the exponents mean depends on it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.approaches import envelope, isoflop
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import Array
from lm.scaling.laws.base import Law
from lm.scaling.read import Points
from lm.scaling.words import entry

FURTHER = 10.0  # times the largest budget: where tokens/parameter is asked
Counter = Callable[[Points], Array]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What counts as a parameter, N [points], and as the FLOPs of a whole run, C [points]; `meaning` says both."""

    name: str
    meaning: str
    n: Counter
    c: Counter


def _column(found: Points, name: str) -> Array:
    return read.numbers(found.table, name, "--counting")


def _total(found: Points) -> Array:
    return _column(found, "params_total") if "params_total" in found.table else found.n


def _nonembedding(found: Points) -> Array:
    """params_nonembedding; from the shape L (4 D^2 + 2 D F) with F = 4 D where d_ff is absent: Kaplan's 12 L D^2."""
    if "params_nonembedding" in found.table:
        return _column(found, "params_nonembedding")
    layers, width = _column(found, "n_layer"), _column(found, "d_model")
    hidden = _column(found, "d_ff") if "d_ff" in found.table else 4 * width
    return layers * (4 * width**2 + 2 * width * hidden)


def _with_head(found: Points) -> Array:
    return _nonembedding(found) + _column(found, "vocab_size") * _column(found, "d_model")


def _six(n: Counter) -> Counter:
    return lambda found: 6 * n(found) * found.d


def _attention(own: str, per_token: Callable[[Array], Array]) -> Counter:
    """The column `own` of our run table, else 6 N D with the head and 3 L D times the pairs that a token attends to."""

    def flops(found: Points) -> Array:
        if own in found.table:
            return _column(found, own)
        layers, width, length = (_column(found, name) for name in ("n_layer", "d_model", "context_length"))
        return found.d * (6 * _with_head(found) + 3 * layers * width * per_token(length))

    return flops


_causal = _attention("flops_matmul", lambda length: 2 * (length + 1))
_full = _attention("flops_matmul_full", lambda length: 4 * length)
RULES = (
    Rule("6nd", "N all parameters, C = 6 N D", _total, _six(_total)),
    Rule("kaplan", "N without embeddings and head, C = 6 N D", _nonembedding, _six(_nonembedding)),
    Rule("head", "N with the head, without embeddings, C = 6 N D", _with_head, _six(_with_head)),
    Rule("causal", "N with the head, without embeddings, C with causal attention", _with_head, _causal),
    Rule("causal_embeddings", "N all parameters, C with causal attention", _total, _causal),
    Rule("full", "N with the head, without embeddings, C with attention over T x T", _with_head, _full),
    Rule("full_embeddings", "N all parameters, C with attention over T x T", _total, _full),
)


def analyse(
    fitted: Fitted, spec: Bootstrap, kind: Interval, clusters: Array | None = None, *, seed: int
) -> dict[str, Any]:
    """The counting part of `fit.json`: {law, rules, refused, warnings}: a law that allocates, under each rule.

    FLOPs are those of training, forward and backward: 6 a parameter and token; a token that attends to T keys takes
    12 L D T more over the whole T x T, and 6 L D (T + 1) counted causally (L layers of width D, context T; every
    score and every weighted sum is a product of width D). Where they are not 6 N, the FLOPs of a token are taken as
    k N^g, the power law through the runs (`g`): N* ~ C^a with a = beta / (alpha + g beta). Tokens/parameter is asked at
    ten times the largest C under the rule itself. IsoFLOP groups stay those of the table: where a rule spreads the C of
    a group (`spread`, largest over smallest), its losses are carried along the rule's own surface to the group's
    geometric mean. Rules whose columns are missing are refused by name.

    Raises:
      UsageError: fewer than two rules can be counted.
    """
    law = fitted.law
    rows, refused = [], []
    for rule in RULES:
        try:
            rows.append(_counted(fitted, rule, spec, kind, clusters, seed))
        except UsageError as error:
            refused.append({"rule": rule.name, "meaning": rule.meaning, "reason": f"{error.what} ({error.where})"})
    if len(rows) < 2:
        raise UsageError(
            "; ".join(dict.fromkeys(row["reason"] for row in refused)),
            where="--counting",
            do="Add columns of the shapes: params_nonembedding (or n_layer, d_model), vocab_size, d_model, n_layer and "
            "context_length.",
        )
    return {"law": law.name, "rules": rows, "refused": refused, "warnings": _warnings(rows)}


def lines(part: Mapping[str, Any]) -> list[str]:
    """The rules side by side in plain text."""
    shown = [f"counting rules (the same runs; a of N* ~ C^a by the {part['law']} surface and by IsoFLOP):"]
    width = max(len(row["rule"]) for row in part["rules"])
    for row in part["rules"]:
        by_isoflop = entry(row["isoflop"]) if row["isoflop"] else f"none ({row['budgets']} usable budgets)"
        exponents = ", ".join(f"{name} {entry(value)}" for name, value in row["exponents"].items())
        shown += [
            f"  {row['rule']:<{width}}  a {entry(row['a'])}, IsoFLOP {by_isoflop}; "
            f"{entry(row['tokens_per_parameter'])} tokens/parameter at {row['budget']:.3g} FLOP",
            f"  {'':<{width}}  {row['meaning']}{_elasticity(row['g'])}; {exponents}"
            + ("" if row["certified"] else "; THE FIT IS NOT CERTIFIED"),
        ]
    return shown + [f"  {row['rule']:<{width}}  refused: {row['reason']}" for row in part["refused"]]


def _elasticity(g: float) -> str:
    return "" if abs(g - 1) < 1e-9 else f" ~ N^{g:.3f} D"


def recount(found: Points, rule: Rule) -> Points:
    """The points under a rule: n and c its own, d and the losses as they are."""
    return dataclasses.replace(
        found, n=rule.n(found), c=rule.c(found), conventions=(rule.meaning,), warnings=(), columns=found.columns
    )


def _counted(
    fitted: Fitted, rule: Rule, spec: Bootstrap, kind: Interval, clusters: Array | None, seed: int
) -> dict[str, Any]:
    found = recount(fitted.found, rule)
    again = fit_points(found, fitted.law, fitted.problem.objective, fitted.pins)
    g, log_k = map(float, isoflop.power_law(np.log(found.n), np.log(found.c / found.d)))
    budget = FURTHER * float(found.c.max())

    def derived(theta: Array) -> dict[str, Array]:
        return _optimum(fitted.law, again.natural(theta), g, math.log(budget) - log_k)

    values = derived(again.theta)
    drawn = left_out = None
    if spec.resamples:
        drawn = derived(bootstrap.draw(again.problem, again.theta, spec).theta)
        if kind is Interval.BCA:
            left_out = derived(bootstrap.jackknife(again.problem, again.theta, spec))
    entries = {}
    for name in values:
        value, ends = float(values[name]), None
        if drawn is not None:
            ends = bootstrap.interval(drawn[name], value, None if left_out is None else left_out[name], kind)
        entries[name] = {"value": _finite(value), "interval": ends and [_finite(end) for end in ends]}
    grouped, spread = _grouped(again, fitted.found, clusters)
    curves = isoflop.analyse(grouped, seed=seed)
    return {
        "rule": rule.name,
        "meaning": rule.meaning,
        "a": entries["a"],
        "exponents": {name: entries[name] for name in fitted.law.exponents},
        "isoflop": curves["exponents"].get("a"),
        "budgets": len(curves["budgets"]),
        "spread": spread,
        "budget": budget,
        "tokens_per_parameter": entries["tokens_per_parameter"],
        "g": g,
        "certified": again.certificate.passed,
    }


def _optimum(law: Law, parameters: Array, g: float, log_c: float) -> dict[str, Array]:
    """Exponents [...] of natural parameters [..., P], and tokens/parameter where log of C / k = N^g D is `log_c`."""
    terms = law.balanced(parameters)
    if terms is None:
        raise TypeError(f"'{law.name}' allocates nothing")
    log_a, alpha, log_b, beta = terms
    log_n = (log_a + np.log(alpha) - log_b - np.log(g * beta) + beta * log_c) / (alpha + g * beta)
    with np.errstate(over="ignore"):
        ratio = np.exp(log_c - (g + 1) * log_n)
    exponents = {name: parameters[..., law.index[name]] for name in law.exponents}
    return {"a": beta / (alpha + g * beta), "tokens_per_parameter": ratio, **exponents}


def _grouped(again: Fitted, original: Points, clusters: Array | None) -> tuple[Points, float]:
    """Ends of runs with the losses that the surface expects at one C for each of the table's own groups."""
    ends = envelope.last_rows(again.found, clusters)
    codes, _ = isoflop.group_budgets(envelope.last_rows(original, clusters))
    n, d, c = ends.n, ends.d, ends.c
    log_c = np.log(c)
    middle = (np.bincount(codes, log_c) / np.bincount(codes))[codes]
    table = {"n": n, "d": d * np.exp(middle - log_c), "c": np.exp(middle)}
    expected, here = (
        again.law.predict(again.estimate, {name: at[name] for name in again.law.variables})
        for at in (table, {"n": n, "d": d, "c": c})
    )
    apart = max(float(np.ptp(log_c[codes == k])) for k in np.unique(codes))
    grouped = dataclasses.replace(
        ends,
        d=table["d"],
        c=table["c"],
        loss=ends.loss * expected / here,
        table=ends.table.assign(budget=table["c"]),
    )
    return grouped, math.exp(apart)


def _warnings(rows: list[dict[str, Any]]) -> list[str]:
    low, high = (end(rows, key=lambda row: row["a"]["value"]) for end in (min, max))
    widths = [row["a"]["interval"] for row in rows if row["a"]["interval"]]
    width = float(np.median([high - low for low, high in widths])) if widths else 0.0
    gap = high["a"]["value"] - low["a"]["value"]
    if gap <= width:
        return []
    return [
        f"the counting rule alone moves a from {low['a']['value']:.3f} ({low['rule']}) to {high['a']['value']:.3f} "
        f"({high['rule']}), further than its 95 % interval is wide: name the rule with the exponent"
    ]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
