"""Hold-out by compute: laws fitted to the runs below a cut-off predict the runs above, as a plan will ask them to.

Laws are ranked by that error and never by how well they fit: the in-sample objective stands beside it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.approaches.isoflop import WIDEST_BUDGET, group_budgets
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import LEVEL, Bootstrap
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import Array, Objective
from lm.scaling.laws import LAWS
from lm.scaling.laws.base import Law

FORMS = (
    *("hoffmann", "hoffmann_tied", "gamma", "kaplan_joint", "saturating_c", "kaplan_c"),
    *("optimum_nd", "optimum_n", "optimum_d", "optimum_c"),
)
MOST_CUTS = 4
QUANTILES = (0.5, 0.7, 0.9)
RUNS_OF_A_BUDGET = 4
POINTS_PER_PARAMETER = 2
RESAMPLES = 200


def default_forms(law: Law) -> tuple[Law, ...]:
    """The laws that `law` is compared with unless others are named: those of `FORMS` that are of the same thing."""
    return tuple(one for one in LAWS if one.name in FORMS and one.of_loss == law.of_loss)


def analyse(
    found: read.Points,
    law: Law,
    others: Sequence[Law],
    objective: Objective,
    *,
    pins: Mapping[str, float],
    spec: Bootstrap,
    cutoffs: Sequence[float] = (),
) -> dict[str, Any]:
    """Scores `law` (with `pins`) and `others` at `cutoffs` in FLOP (default: the upper budgets, else quantiles of c).

    Returns {cuts: [{flop, below, above}], laws: [{law, score, in_sample, cuts: [...]}], objective, notes}, best score
    first. A law's cut is {mean_error, mean_absolute_error, inside, worst_error, worst_extrapolation, certified} with
    errors of the predicted loss in percent of the measured one, or {refused}. `score` is the mean over the cut-offs of
    the mean absolute error; None, and last, for a law that was refused at one. `inside` is the share of held-out runs
    in their 95 % prediction interval, as `planning.predict` makes it, from 200 resamples of the kind of `spec`.
    Clusters count by their largest run: one that reaches above a cut-off is not fitted below it.

    Raises:
      UsageError: all runs have one compute budget, or no cut-off leaves two points for each parameter below it and
        one above.
    """
    laws = list({one.name: one for one in (law, *others)}.values())
    reach = found.c if spec.clusters is None else _largest(found.c, spec.clusters)
    most = max(len(one.parameters) for one in laws)
    cuts = [cut for cut in (cutoffs or _cutoffs(found)) if (reach < cut).sum() >= POINTS_PER_PARAMETER * most]
    cuts = [cut for cut in cuts if (found.c >= cut).any()][-MOST_CUTS:]
    if not cuts:
        raise UsageError(
            f"no cut-off of compute leaves {POINTS_PER_PARAMETER * most} points below it and one above",
            where="--holdout",
            do="Add runs, or compare laws with fewer parameters.",
        )
    scored = []
    for one in laws:
        held = pins if one is law else {}
        scores = [_score(found, reach < cut, found.c >= cut, one, objective, held, spec) for cut in cuts]
        in_sample = None if any("refused" in score for score in scores) else fit_points(found, one, objective, held)
        errors = [score["mean_absolute_error"] for score in scores if "refused" not in score]
        scored.append(
            {
                "law": one.name,
                "score": float(np.mean(errors)) if len(errors) == len(cuts) else None,
                "in_sample": in_sample and in_sample.certificate.objective,
                "cuts": scores,
            }
        )
    recipes = [name for name in read.FINGERPRINTS if name in found.table]
    return {
        "objective": objective.name,
        "cuts": [
            {"flop": float(cut), "below": int((reach < cut).sum()), "above": int((found.c >= cut).sum())}
            for cut in cuts
        ],
        "laws": sorted(scored, key=lambda entry: np.inf if entry["score"] is None else entry["score"]),
        "notes": []
        if recipes
        else ["the table names no corpus, tokenizer or evaluation set: that all runs share them is not checked"],
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The scores as plain text, best first."""
    cuts = "; ".join(f"C < {cut['flop']:.4g} ({cut['below']} points) for {cut['above']} above" for cut in part["cuts"])
    found = [
        f"hold-out by compute, {part['objective']}: fitted to {cuts}",
        "  ranked by the mean absolute error of the predicted loss, in % of the measured one, over the cut-offs",
    ]
    for place, entry in enumerate(part["laws"], start=1):
        score = "no score" if entry["score"] is None else f"{entry['score']:.2f} %"
        whole = "none" if entry["in_sample"] is None else f"{entry['in_sample']:.6g}"
        found.append(f"  {place}. {entry['law']}: {score}; objective of the fit to all points {whole}")
        for cut, at in zip(entry["cuts"], part["cuts"], strict=True):
            if "refused" in cut:
                found.append(f"     C < {at['flop']:.4g}: refused: {cut['refused']}")
                continue
            found.append(
                f"     C < {at['flop']:.4g}: {cut['mean_absolute_error']:.2f} %, mean {cut['mean_error']:+.2f} %, "
                f"worst {cut['worst_error']:+.2f} % at {cut['worst_extrapolation']:.3g} times the largest fitted "
                f"compute; {cut['inside']:.0%} inside their 95 % prediction interval"
                + ("" if cut["certified"] else "; THE FIT IS NOT CERTIFIED")
            )
    return found + [f"  {note}" for note in part["notes"]]


def _cutoffs(found: read.Points) -> list[float]:
    codes, budgets = group_budgets(found)
    if len(budgets) == 1 and found.c.max() <= WIDEST_BUDGET * found.c.min():
        raise UsageError(
            "all runs have one compute budget: nothing to hold out", where="--holdout", do="Add runs of another budget."
        )
    if len(budgets) > 1 and np.median(np.bincount(codes)) >= RUNS_OF_A_BUDGET:
        return [float(found.c[codes == k].min()) for k in range(1, len(budgets))]
    highest = [np.quantile(found.c, share, method="higher") for share in QUANTILES]
    # Computes that differ by rounding are one: none of them is held out while another is fitted.
    return sorted({float(found.c[found.c >= cut * (1 - read.SAME)].min()) for cut in highest})


def _largest(c: Array, clusters: Array) -> Array:
    """The largest compute [points] of the cluster that each point belongs to."""
    most = np.zeros(clusters.max() + 1)
    np.maximum.at(most, clusters, c)
    return most[clusters]


def _score(
    found: read.Points, below: Array, above: Array, law: Law, objective: Objective, pins: Mapping[str, float],
    spec: Bootstrap,
) -> dict[str, Any]:  # fmt: skip
    from scipy.special import stdtr

    try:
        fitted = fit_points(found.subset(below), law, objective, pins)
    except UsageError as refusal:
        return {"refused": refusal.what}
    held_out = found.subset(above)
    table = {name: held_out.variable(name) for name in law.variables}
    error = 100 * (law.predict(fitted.estimate, table) / held_out.loss - 1)
    means = np.log(law.predict(_resampled(fitted, spec, below), table))
    noise = max(fitted.noise["residual_sd"] or 0.0, fitted.noise["seed_sd"] or 0.0, 1e-300)
    # The share of a new run's distribution, each resample's mean with noise about it, that lies below the measured one.
    lower = stdtr(fitted.noise["freedom"], (np.log(held_out.loss) - means) / noise).mean(0)
    worst = int(np.abs(error).argmax())
    return {
        "mean_error": float(error.mean()),
        "mean_absolute_error": float(np.abs(error).mean()),
        "inside": float(np.mean(np.abs(lower - 0.5) <= LEVEL / 2)),
        "worst_error": float(error[worst]),
        "worst_extrapolation": float(held_out.c[worst] / fitted.found.c.max()),
        "certified": fitted.certificate.passed,
    }


def _resampled(fitted: Fitted, spec: Bootstrap, chosen: Array) -> Array:
    clusters = None if spec.clusters is None else np.unique(spec.clusters[chosen], return_inverse=True)[1]
    drawn = bootstrap.draw(
        fitted.problem, fitted.theta, dataclasses.replace(spec, resamples=RESAMPLES, clusters=clusters)
    )
    return fitted.natural(drawn.theta)
