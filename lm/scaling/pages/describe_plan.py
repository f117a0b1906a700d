"""A plan as plain text: warnings first, then each budget's best model, what a smaller one takes, and the next runs."""

from collections import Counter

from lm.scaling.planning.next_runs import NextRuns
from lm.scaling.planning.optimum import SERVING
from lm.scaling.planning.plan import NEAR, Estimate, Optimal, Plan, Smaller
from lm.scaling.words import span


def describe_plan(plan: Plan) -> str:
    """The whole plan in plain text, ready to print."""
    lines = [f"WARNING: {warning}" for warning in plan.warnings]
    lines += [
        f"WARNING: at {optimum.budget.value:.4g} FLOP {warning}"
        for optimum in plan.optima
        for warning in optimum.warnings
    ]
    cost = f"training C = {plan.flops_per_nd:.4g} n d FLOP"
    if plan.inference_tokens:
        cost += f", serving {plan.inference_tokens:.4g} tokens {SERVING:g} n each"
    if plan.unique_tokens:
        cost += f", {plan.unique_tokens:.4g} distinct training tokens"
    has_intervals = any(optimum.n.interval is not None for optimum in plan.optima)
    intervals = ["intervals: 95 %, percentiles of the fit's resamples"] if has_intervals else []
    lines.append("; ".join([f"{plan.law}: {cost}", *plan.conventions, *intervals]))
    for optimum in plan.optima:
        lines += _optimum(plan, optimum)
    return "\n".join(lines + ([] if plan.next_runs is None else _next(plan.next_runs)))


def _optimum(plan: Plan, optimum: Optimal) -> list[str]:
    low, high = optimum.near_optimal
    n = optimum.n.value or 1.0
    whole = (
        f"training and serving, {optimum.training_flops:.4g} of it training" if plan.inference_tokens else "training"
    )
    lines = [
        f"C = {_span(optimum.budget)} FLOP ({whole}):",
        f"  N* {_span(optimum.n)} parameters, D* {_span(optimum.d)} tokens",
        f"  tokens/parameter {_span(optimum.tokens_per_parameter)}, loss {_span(optimum.loss)} nats/token",
        f"  as good to {NEAR:.1%} at this budget: N from {low:.4g} to {high:.4g} ({low / n:.2f} to {high / n:.2f} N*)",
    ]
    if optimum.epochs is not None:
        lines.append(f"  epochs {_span(optimum.epochs)} over the distinct tokens")
    if optimum.instead is not None:
        other = optimum.instead
        lines.append(
            f"  saves {other.saving:.2%} of the whole cost of the model of this loss that is cheapest to train: "
            f"N {other.n:.4g} on {other.d:.4g} tokens, {other.flops:.4g} FLOP with serving"
        )
    lines.append(f"  {'smaller models':<22} | same loss: tokens  training  cheaper if served | same budget: loss")
    return lines + [_smaller(row) for row in optimum.smaller]


def _smaller(row: Smaller) -> str:
    name = f"  {f'N*/{1 / row.share:g} = {row.n:.4g}':<22}"
    if row.tokens is None or row.extra_training is None or row.served_tokens is None:
        same = f"{'out of reach on any number of tokens':>46}"
    else:
        same = f"{row.tokens:>17.4g}  {row.extra_training:>+8.1%}  {f'over {row.served_tokens:.4g}':>17}"
    return f"{name} | {same} | {row.loss:>10.5f} ({row.loss_penalty:+.2%})"


def _next(proposed: NextRuns) -> list[str]:
    spent = sum(run.c for run in proposed.runs)
    return [
        f"next runs: {spent:.4g} of {proposed.cap:.4g} FLOP in all, within the fitted ranges, widened "
        f"{proposed.stretch:g} times ({proposed.limits}):",
        *(
            f"    {f'{times} x ' if times > 1 else ''}n = {run.n:.4g} on d = {run.d:.4g} tokens: {run.c:.4g} FLOP"
            for run, times in Counter(proposed.runs).items()
        ),
        f"  95 % interval of N* at {proposed.budget:.4g} FLOP, upper over lower end: {proposed.width_before:.4g} now, "
        f"{proposed.width_after:.4g} expected with them",
    ]


def _span(estimate: Estimate) -> str:
    return span(estimate.value, estimate.interval)
