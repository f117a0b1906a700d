"""A fit and a prediction as plain text: warnings first, then the law, the optima and the IsoFLOP curves."""

from typing import Any

from lm.scaling.planning.predict import Prediction
from lm.scaling.result import FitResult

SHOWN_REFUSALS = 12


def describe(result: FitResult) -> str:
    """The whole fit in plain text, ready to print."""
    lines = [f"WARNING: {warning}" for warning in result.warnings]
    lines += [*_law(result), *_optima(result), *_isoflop(result.isoflop)]
    for other in result.others:
        values = ", ".join(
            f"{name} {_span(value, other['intervals'][name])}" for name, value in other["parameters"].items()
        )
        lines += [f"beside it: {other['law']}: {values}; objective {other['objective']['value']:.6g}"]
        lines += [
            f"  WARNING ({other['law']}): {warning}" for warning in other["warnings"] if warning not in result.warnings
        ]
    return "\n".join(lines)


def describe_prediction(prediction: Prediction) -> str:
    """One prediction in plain text, warnings first."""
    lines = [f"WARNING: {warning}" for warning in prediction.warnings]
    (low, high), (far_low, far_high) = prediction.mean_interval, prediction.prediction_interval
    return "\n".join(
        [
            *lines,
            f"n = {prediction.n:.6g} parameters, d = {prediction.d:.6g} tokens",
            f"loss {prediction.mean:.5f} nats/token",
            f"  95 % interval of the mean   {low:.5f} to {high:.5f}",
            f"  95 % prediction interval    {far_low:.5f} to {far_high:.5f}  (one new run)",
        ]
    )


def _law(result: FitResult) -> list[str]:
    objective, proof, made = result.objective, result.certificate, result.provenance
    delta = f" (delta {objective['delta']:g})" if objective["delta"] else ""
    lines = [
        f"{result.law}: L = {result.formula}   {result.points} points, {objective['name']}{delta}, "
        f"summed: {objective['value']:.10g}"
    ]
    for name, value in result.parameters.items():
        pinned = "   pinned" if name in made["pins"] else ""
        error = result.standard_errors[name]
        shown = f"   se {error:.3g}" if error is not None and not pinned else ""
        lines.append(f"  {name:<6} {_span(value, None if pinned else result.intervals[name])}{shown}{pinned}")
    gradient = (
        f"subgradient {proof['subgradient']:.3g}"
        if proof["subgradient"] is not None
        else f"gradient {proof['scaled_gradient']:.1e}"
    )
    lines.append(
        f"  certificate {'holds' if proof['passed'] else 'FAILS'}: {gradient}, {proof['starts_agreeing']:.0%} of "
        f"{proof['starts']} starts agree, {proof['second_solver']} gap {proof['second_solver_gap']:.1e}, "
        f"{proof['dtype']}, {proof['points_beyond_delta']} points beyond delta"
    )
    spec = made["bootstrap"]
    lines.append(
        f"  intervals: 95 %, {spec['interval']}, {spec['resamples']} resamples by {spec['kind']}; "
        + "; ".join(made["conventions"])
    )
    noise = f"  noise: residual {_number(result.noise['residual_sd']):.2%}"
    seed = result.noise["seed_sd"]
    return [*lines, noise + (f", between seeds {seed:.2%}" if seed is not None else "") + " of the loss"]


def _optima(result: FitResult) -> list[str]:
    if not result.derived:
        return []
    made = result.derived
    lines = [
        f"compute-optimal: N* ~ C^a, D* ~ C^b with a = {_entry(made['a'])}, b = {_entry(made['b'])}; "
        f"C = {made['flops_per_nd']:.4g} N D"
    ]
    for row in made["optimum"]:
        lines.append(
            f"  C = {row['budget']:.4g}: N* {_entry(row['n'])}, D* {_entry(row['d'])}, "
            f"tokens/parameter {_entry(row['tokens_per_parameter'])}, loss {_entry(row['loss'])}"
        )
    return lines


def _isoflop(part: dict[str, Any]) -> list[str]:
    lines = [f"IsoFLOP: {len(part['budgets'])} usable budgets, {len(part['refused'])} refused"]
    for row in part["budgets"]:
        lines.append(
            f"  C = {row['budget']:.4g}: N* {_span(row['n'], row['n_interval'])}, "
            f"D* {_span(row['d'], row['d_interval'])}, "
            f"tokens/parameter {row['tokens_per_parameter']:.4g}, loss {row['loss']:.5f}"
        )
    for row in part["refused"][:SHOWN_REFUSALS]:
        lines.append(f"  C = {row['budget']:.4g}: refused: {row['reason']}")
    if len(part["refused"]) > SHOWN_REFUSALS:
        lines.append(f"  and {len(part['refused']) - SHOWN_REFUSALS} more refused (all in the fit file)")
    if part["exponents"]:
        lines.append(
            "  exponents: " + ", ".join(f"{name} = {_entry(entry)}" for name, entry in part["exponents"].items())
        )
    return lines + [f"  {note}" for note in part["notes"]]


def _entry(entry: dict[str, Any]) -> str:
    return _span(entry["value"], entry["interval"])


def _span(value: float | None, ends: list[float | None] | None) -> str:
    shown = "unbounded" if value is None else f"{value:.5g}"
    if ends is None:
        return shown
    low, high = ("unbounded" if end is None else f"{end:.4g}" for end in ends)
    return f"{shown} [{low}, {high}]"


def _number(value: float | None) -> float:
    return 0.0 if value is None else value
