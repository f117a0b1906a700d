"""The report's section of all approaches side by side: what each says, and how far they disagree."""

from typing import Any

from lm.scaling.pages.markup import entry, escaped, number, size, table
from lm.scaling.result import FitResult

_VERDICTS = {True: "differs", False: "does not differ", None: "cannot be told apart"}


def side_by_side(fit: FitResult) -> str:
    """The section's HTML; a sentence where the fit compared nothing."""
    if "compare" not in fit.checks:
        return "<p>The fit did not set other approaches beside the law: lm fit --compare does.</p>" + _bias(fit)
    part = fit.checks["compare"]
    budgets = [at["budget"] for at in part["approaches"][0]["optima"]]
    columns = (f"{what} at {budget:.3g} FLOP" for budget in budgets for what in ("N*", "tokens/parameter", "loss"))
    head = ("approach", "exponent of N*", *columns)
    rows = [
        (
            escaped(row["approach"]) + ("" if row["certified"] in (True, None) else " (not certified)"),
            _entry(row["a"]),
            *(cell for at in row["optima"] for cell in _optimum(at)),
        )
        for row in part["approaches"]
    ]
    ratios = [
        (escaped(row["approach"]), _entry(row["ratio"]), _VERDICTS[row["differs"]])
        for row in part["approaches"]
        if row["ratio"] is not None
    ]
    reference = escaped(part["reference"])
    return (
        f"<p>All from the same {part['points']} points ({escaped(part['rows'])}), {escaped(part['objective'])}. "
        f"Intervals are 95 %, from the same {part['resamples']} pseudo-tables for all: the residuals of {reference} "
        f"with a random sign a {escaped(part['resampling'])}. "
        f"They are a little narrow: {escaped(part['coverage'])}.</p>"
        + table(head, rows)
        + f"<h3>How far they disagree</h3><p>{_spread(part['disagreement'])}</p>"
        + table(("approach", f"N* over that of {reference}", "at 95 %"), ratios, text=(2,))
        + "".join(f"<p>{escaped(row['approach'])}: {escaped(row['reason'])}.</p>" for row in part["absent"])
        + _bias(fit)
    )


def _spread(spread: dict[str, Any]) -> str:
    if spread["factor"] is None:
        return "No approach gives a finite N*."
    low, high = (f"{size(end['n'])} ({escaped(end['approach'])})" for end in (spread["lowest"], spread["highest"]))
    return f"At {number(spread['budget'])} FLOP, N* runs from {low} to {high}: a factor of {number(spread['factor'])}."


def _bias(fit: FitResult) -> str:
    part = fit.checks.get("parabola_bias")
    if part is None:
        return ""
    return (
        "<p>Parabola bias: if the fitted law were true, parabolas through losses without noise at these very points "
        f"would put N* {_percent(part['mean']['n_percent'])} and D* {_percent(part['mean']['d_percent'])} off its own "
        f"optimum, averaged over {len(part['budgets'])} budgets.</p>"
    )


def _optimum(at: dict[str, Any]) -> tuple[str, str, str]:
    loss = "–" if at["loss"] is None else _entry(at["loss"])
    n, ratio = (entry(at[key]["value"], at[key]["interval"], size) for key in ("n", "tokens_per_parameter"))
    return n, ratio, loss


def _entry(part: dict[str, Any]) -> str:
    return entry(part["value"], part["interval"])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f} %".replace("-", "−")
