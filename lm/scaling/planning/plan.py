"""From a fit to a budget's best model: N*, D* and loss with intervals, how flat it is there, what a smaller one costs.

The model is the compute-optimal one, or with tokens to be served the one of least training and serving together, and
with few distinct tokens the one for which repeating them is allowed for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lm.base.errors import UsageError
from lm.scaling.fitting.bootstrap import LEVEL
from lm.scaling.laws import LAWS, law_named
from lm.scaling.laws.base import Array
from lm.scaling.laws.repeated import MUENNIGHOFF, REPEATED, REPEATED_FREE
from lm.scaling.planning.next_runs import NextRuns, next_runs
from lm.scaling.planning.optimum import MOST, SERVING, Optimum, Surface, best, cheapest, log_tokens_for, near_optimal
from lm.scaling.planning.predict import Extrapolation, carried_over, extrapolation
from lm.scaling.result import FitResult

NEAR = 1e-3  # of the optimal loss: what counts as no worse
SMALLER = (1 / 2, 1 / 4, 1 / 8)  # of N*: how far the table of over-training goes
EDGE = 1e-6  # of a logarithm: an optimum as near to one parameter or one token is none


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over the fit's resamples; None where it is unbounded, or there are none."""

    value: float | None
    interval: tuple[float | None, float | None] | None


@dataclasses.dataclass(frozen=True)
class Smaller:
    """What a model of `share` times N* takes: more tokens for the same loss, or a higher loss for the same budget.

    `extra_training` is the share of the optimum's training FLOP that the same loss costs on top, `served_tokens` from
    how many served tokens on it is cheaper in all (None: the loss is out of its reach); a served token costs `share`.
    """

    share: float
    n: float
    tokens: float | None
    extra_training: float | None
    served_tokens: float | None
    loss: float
    loss_penalty: float


@dataclasses.dataclass(frozen=True)
class Instead:
    """The model of the same loss that is cheapest to train, and the share of its whole cost that the plan saves."""

    n: float
    d: float
    flops: float
    saving: float


@dataclasses.dataclass(frozen=True)
class Optimal:
    """The best model at a `budget` in FLOP (training and, where asked for, serving), with all that hangs on it.

    `near_optimal` are the least and the most parameters within 0.1 % of its loss at the same budget; `epochs` is None
    without a limit of distinct tokens, `instead` without tokens to serve.
    """

    budget: Estimate
    n: Estimate
    d: Estimate
    tokens_per_parameter: Estimate
    loss: Estimate
    training_flops: float
    near_optimal: tuple[float, float]
    smaller: tuple[Smaller, ...]
    epochs: Estimate | None
    instead: Instead | None
    extrapolation: Extrapolation
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that `lm plan` says; `warnings` are about the fit, those of each optimum stand with it.

    `columns` are those of the fit's table, which say how n and FLOP were counted.
    """

    law: str
    columns: Mapping[str, str | None]
    conventions: tuple[str, ...]
    flops_per_nd: float
    inference_tokens: float | None
    unique_tokens: float | None
    optima: tuple[Optimal, ...]
    next_runs: NextRuns | None
    warnings: tuple[str, ...]


def plan(
    result: FitResult,
    *,
    budgets: Sequence[float] = (),
    loss: float | None = None,
    inference_tokens: float | None = None,
    unique_tokens: float | None = None,
    next_count: int = 0,
    next_budget: float | None = None,
) -> Plan:
    """Plans the best model at each budget (FLOP), or the cheapest one of a `loss` in nats/token.

    `next_count` runs of at most `next_budget` FLOP in all are proposed for the largest budget.

    Raises:
      UsageError: a number that is not positive, a loss below the law's floor, or a law that allocates nothing.
    """
    _check(budgets, loss, inference_tokens, unique_tokens)
    surface, warnings = _surface(result, inference_tokens, unique_tokens)
    if not result.bootstrap_samples:
        warnings.append("the fit has no bootstrap samples: no intervals and no next runs (fit with --bootstrap 1000)")
    found = [_best(surface, budget) for budget in budgets] if loss is None else [_cheapest(surface, result, loss)]
    if surface.law.name != result.law and any(_repeats(surface, optimum) for optimum in found):
        warnings.append(
            "how repeated tokens count is not in this fit: R_D = {R_D:.4g} and R_N = {R_N:.4g} are those published for "
            "other models and text (Muennighoff et al. 2023), and no interval allows for them".format(**MUENNIGHOFF)
        )
    proposed = None
    if next_count:
        last = max(float(optimum.budget[0]) for optimum in found)
        resamples = dataclasses.replace(surface, parameters=surface.parameters[1:])
        aim = best(resamples, last).log_n
        proposed = next_runs(result, resamples, aim, budget=last, count=next_count, cap=next_budget)
    return Plan(
        result.law,
        result.provenance["columns"],
        tuple(result.provenance["conventions"]),
        surface.flops_per_nd,
        inference_tokens,
        unique_tokens,
        tuple(_optimal(result, surface, optimum, target=loss) for optimum in found),
        proposed,
        (*carried_over(result), *warnings),
    )


def _check(
    budgets: Sequence[float], loss: float | None, inference_tokens: float | None, unique_tokens: float | None
) -> None:
    if bool(budgets) == (loss is not None):
        raise UsageError("give either budgets or one loss", where="--budget, --loss", do="For example --budget 1e24.")
    asked = [
        *(("--budget", "FLOP", budget) for budget in budgets),
        ("--loss", "nats/token", loss),
        ("--inference-tokens", "tokens", inference_tokens),
        ("--unique-tokens", "tokens", unique_tokens),
    ]
    for flag, unit, value in asked:
        nothing = value == 0 and flag == "--inference-tokens"
        if value is not None and not (nothing or 0 < value < MOST):
            raise UsageError(f"{value:g} {unit}", where=flag, do=f"Give a positive number below {MOST:g}.")
    if len(set(budgets)) < len(budgets):
        raise UsageError("the same budget twice", where="--budget", do="Give each once.")


def _surface(
    result: FitResult, inference_tokens: float | None, unique_tokens: float | None
) -> tuple[Surface, list[str]]:
    """The estimate (row 0) and its resamples as one surface, under a law of repeated data where tokens are limited."""
    law = law_named(result.law)
    parameters = np.vstack([result.estimate, *([result.samples] if result.bootstrap_samples else [])])
    planned = [known.name for known in LAWS if known.of_loss and {"n", "d"} <= set(known.variables)]
    if law.name not in planned:
        raise UsageError(
            f"'{law.name}' allocates nothing: it does not say how the loss depends on n and d together",
            where="--fit",
            do=f"Fit one of: {', '.join(planned)}.",
        )
    warnings = [
        f"{name}={result.parameters[name]:g} has two digits: optima far away move by half with the third"
        for name in law.exponents
        if result.parameters[name] == round(result.parameters[name], 2)
    ]
    if unique_tokens is not None and "u" not in law.variables:
        by_base = {repeated.base.name: repeated for repeated in (REPEATED, REPEATED_FREE)}
        if law.name not in by_base:
            raise UsageError(
                f"'{law.name}' has no term for repeated tokens",
                where="--unique-tokens",
                do=f"Fit one of: {', '.join([*by_base, REPEATED.name, REPEATED_FREE.name])}.",
            )
        law = by_base[law.name]
        decays = [MUENNIGHOFF[name] for name in law.decaying]
        parameters = np.hstack([parameters, np.tile(decays, (len(parameters), 1))])
    limit = math.inf if unique_tokens is None else unique_tokens
    return Surface(law, parameters, float(result.provenance["flops_per_nd"]), inference_tokens or 0.0, limit), warnings


def _best(surface: Surface, budget: float) -> Optimum:
    if surface.largest(budget) <= 0:
        raise UsageError(f"{budget:g} FLOP pay for no model", where="--budget", do="Give a larger one.")
    found = best(surface, budget)
    if min(found.log_n[0], found.log_d[0]) < EDGE:
        raise UsageError(
            f"under this fit the loss at {budget:g} FLOP has no optimum between one parameter and one token",
            where="--fit",
            do="Look at its warnings; fit more runs or another law.",
        )
    return found


def _cheapest(surface: Surface, result: FitResult, loss: float) -> Optimum:
    found = cheapest(surface, loss)
    if not math.isfinite(found.budget[0]):
        floor = float(np.exp(found.log_loss[0]))
        parts = "".join(f" ({name} = {result.parameters[name]:.6g})" for name in surface.law.constants)
        distinct = f" on {surface.unique_tokens:.4g} distinct tokens" if math.isfinite(surface.unique_tokens) else ""
        raise UsageError(
            f"{loss:g} nats/token is below what the law can reach{distinct}: {floor:.6g}{parts}",
            where="--loss",
            do="Give a larger loss.",
        )
    return found


def _repeats(surface: Surface, optimum: Optimum) -> bool:
    """Whether the smallest model looked at would see tokens more than once at the optimum's budget."""
    log_n = optimum.log_n[:1] + math.log(min(SMALLER))
    return float(surface.log_tokens(log_n, optimum.budget[:1])[0]) > math.log(surface.unique_tokens)


def _optimal(result: FitResult, surface: Surface, found: Optimum, target: float | None) -> Optimal:
    estimate = dataclasses.replace(surface, parameters=surface.parameters[:1])
    optimum = Optimum(*(getattr(found, field.name)[:1] for field in dataclasses.fields(Optimum)))
    n, d = float(np.exp(optimum.log_n[0])), float(np.exp(optimum.log_d[0]))
    low, high = near_optimal(estimate, optimum, NEAR)
    reach = extrapolation(result, n, d)
    with np.errstate(over="ignore", invalid="ignore"):
        return Optimal(
            _estimate(found.budget) if target is not None else Estimate(float(found.budget[0]), None),
            _estimate(np.exp(found.log_n)),
            _estimate(np.exp(found.log_d)),
            _estimate(np.exp(found.log_d - found.log_n)),
            _estimate(np.exp(found.log_loss)) if target is None else Estimate(target, None),
            surface.flops_per_nd * n * d,
            (float(np.exp(low[0])), float(np.exp(high[0]))),
            _smaller(estimate, optimum),
            _estimate(np.exp(found.log_d) / surface.unique_tokens) if math.isfinite(surface.unique_tokens) else None,
            _instead(estimate, optimum) if surface.inference_tokens else None,
            reach,
            reach.warnings,
        )


def _estimate(values: Array) -> Estimate:
    """Row 0 with the quantiles of the rows after it."""
    interval = None
    if len(values) > 1:
        low, high = (_finite(end) for end in np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        interval = (low, high)
    return Estimate(_finite(values[0]), interval)


def _smaller(surface: Surface, optimum: Optimum) -> tuple[Smaller, ...]:
    shares = np.array(SMALLER)
    log_n = optimum.log_n[:, None] + np.log(shares)
    same_loss = np.exp(log_tokens_for(surface, log_n, optimum.log_loss[:, None]))[0]
    same_budget = surface.log_loss(log_n, surface.log_tokens(log_n, optimum.budget[:, None]))[0]
    n_best, d_best = np.exp(optimum.log_n[0]), np.exp(optimum.log_d[0])
    rows = []
    for share, tokens, log_loss in zip(SMALLER, same_loss, same_budget, strict=True):
        extra = share * tokens / d_best - 1
        served = surface.flops_per_nd * d_best * extra / (SERVING * (1 - share))
        rows.append(
            Smaller(
                share,
                float(share * n_best),
                _finite(tokens),
                _finite(extra),
                _finite(served),
                float(np.exp(log_loss)),
                float(np.expm1(log_loss - optimum.log_loss[0])),
            )
        )
    return tuple(rows)


def _instead(surface: Surface, optimum: Optimum) -> Instead:
    trained = cheapest(dataclasses.replace(surface, inference_tokens=0.0), float(np.exp(optimum.log_loss[0])))
    cost = float(surface.flops(trained.log_n, trained.log_d)[0])
    n, d = float(np.exp(trained.log_n[0])), float(np.exp(trained.log_d[0]))
    return Instead(n, d, cost, 1 - float(optimum.budget[0]) / cost)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
