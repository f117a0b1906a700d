"""A fit and a prediction as plain text: warnings first, then the law, the optima and the IsoFLOP curves."""

from lm.scaling.approaches import compare, envelope, interpolate, isoflop, setting
from lm.scaling.checks import counting, coverage, holdout, identifiability, influence, parabola_bias, sensitivity
from lm.scaling.planning.predict import Prediction
from lm.scaling.result import FitResult
from lm.scaling.words import entry, span

OF_THE_LAW = {
    "coverage": coverage.lines,
    "identifiability": identifiability.lines,
    "influence": influence.lines,
    "sensitivity": sensitivity.lines,
}
CHECKS = {
    "setting": setting.lines,
    "counting": counting.lines,
    "holdout": holdout.lines,
    "parabola_bias": parabola_bias.lines,
    "envelope": envelope.lines,
    "interpolation": interpolate.lines,
    "compare": compare.lines,
}


def describe(result: FitResult) -> str:
    """The whole fit in plain text, ready to print."""
    lines = [f"WARNING: {warning}" for warning in result.warnings]
    lines += [*_law(result), *_optima(result)]
    for name, part in result.checks.items():
        lines += OF_THE_LAW[name](part) if name in OF_THE_LAW else []
    lines += isoflop.lines(result.isoflop) if result.isoflop else []
    for name, part in result.checks.items():
        lines += CHECKS[name](part) if name in CHECKS else []
    for other in result.others:
        values = ", ".join(
            f"{name} {span(value, other['intervals'][name])}" for name, value in other["parameters"].items()
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
    what, unit, new, digits = ("loss", " nats/token", "run", ".5f")
    if prediction.setting is not None:
        what, unit, new, digits = (prediction.setting, "", "optimum", ".5g")
    return "\n".join(
        [
            *lines,
            f"n = {prediction.n:.6g} parameters, d = {prediction.d:.6g} tokens"
            + (f", {prediction.u:.6g} of them distinct" if prediction.u < prediction.d else ""),
            f"{what} {prediction.mean:{digits}}{unit}",
            f"  95 % interval of the mean   {low:{digits}} to {high:{digits}}",
            f"  95 % prediction interval    {far_low:{digits}} to {far_high:{digits}}  (one new {new})",
        ]
    )


def _law(result: FitResult) -> list[str]:
    objective, proof, made = result.objective, result.certificate, result.provenance
    number = f" (delta {objective['delta']:g})" if objective["delta"] else ""
    number += f" (over {objective['over']:g})" if objective["over"] != 1 else ""
    what = made["columns"]["optimum_of"] or "L"
    lines = [
        f"{result.law}: {what} = {result.formula}   {result.points} points, {objective['name']}{number}, "
        f"summed: {objective['value']:.10g}"
    ]
    for name, value in result.parameters.items():
        pinned = "   pinned" if name in made["pins"] else ""
        error = result.standard_errors[name]
        shown = f"   se {error:.3g}" if error is not None and not pinned else ""
        lines.append(f"  {name:<6} {span(value, None if pinned else result.intervals[name])}{shown}{pinned}")
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
    intervals = f"95 %, {spec['interval']}, {spec['resamples']} resamples by {spec['kind']}"
    lines.append(f"  intervals: {intervals if spec['resamples'] else 'none'}; " + "; ".join(made["conventions"]))
    noise = f"  noise: residual {_number(result.noise['residual_sd']):.2%}"
    seed = result.noise["seed_sd"]
    return [*lines, noise + (f", between seeds {seed:.2%}" if seed is not None else "") + " of the loss"]


def _optima(result: FitResult) -> list[str]:
    if not result.derived:
        return []
    made = result.derived
    lines = [
        f"compute-optimal: N* ~ C^a, D* ~ C^b with a = {entry(made['a'])}, b = {entry(made['b'])}; "
        f"C = {made['flops_per_nd']:.4g} N D"
    ]
    for row in made["optimum"]:
        lines.append(
            f"  C = {row['budget']:.4g}: N* {entry(row['n'])}, D* {entry(row['d'])}, "
            f"tokens/parameter {entry(row['tokens_per_parameter'])}, loss {entry(row['loss'])}"
        )
        low, high = ("unbounded" if end is None else f"{end:.4g}" for end in row["flat"])
        lines.append(f"    within 0.1 % of that loss: N from {low} to {high}")
    return lines


def _number(value: float | None) -> float:
    return 0.0 if value is None else value
