"""`report.html`: a finished sweep on one page that opens without network."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.files import write_text
from lm.scaling.laws import law_named
from lm.scaling.pages import figures_approaches
from lm.scaling.pages.approaches import side_by_side
from lm.scaling.pages.figures import FIGURES, WIDE, Drawn, fitted, write_figures
from lm.scaling.pages.finished import FinishedSweep, read_sweep
from lm.scaling.pages.markup import (
    card,
    entry,
    escaped,
    facts,
    formula,
    greek,
    interval,
    number,
    section,
    size,
    symbol,
    table,
)
from lm.scaling.pages.style import Format
from lm.scaling.table import COLUMNS

_CSS = Path(__file__).with_name("report.css")
_MIME = {Format.PNG: "image/png", Format.SVG: "image/svg+xml", Format.PDF: "image/svg+xml"}
_IDENTITY = ("sweep", "commit", "versions", "corpus", "tokenizer", "evaluation", "context_length", "vocab_size")
_SHOWN = ("steps", "peak_lr", "loss_se", "bits_per_byte", "wall_seconds", "mfu")


def write_report(folder: Path | str, image_format: Format = Format.PNG) -> Path:
    """Draws the figures of a finished sweep, writes its `report.html` and returns the path of that.

    Raises:
      UsageError: the folder is not a finished sweep's.
      RunError: the disk is full.
    """
    sweep = read_sweep(folder)
    path = sweep.folder / "report.html"
    drawn = write_figures(sweep, (*FIGURES, *figures_approaches.FIGURES), image_format)
    write_text(path, page(sweep, list(drawn), image_format))
    return path


def page(sweep: FinishedSweep, figures: Sequence[Drawn], image_format: Format) -> str:
    """The whole page as text: warnings first, then the answer, the figures, the tables, where it all came from."""
    name = _unique(sweep, "sweep") or sweep.folder.resolve().name
    body = [
        f"<h1>Scaling laws of the sweep {escaped(name)}</h1>",
        f'<p class="quiet">{len(sweep.table)} cells, {sweep.fit.points} of them fitted. '
        "Losses are validation cross-entropies in nats/token; intervals are 95 %.</p>",
        _warnings(sweep),
        _headline(sweep),
        section("Figures", "".join(_figure(drawn, image_format) for drawn in figures) + _without_curve(sweep)),
        section("The fit", _parameters(sweep) + _fit_facts(sweep)),
        section("IsoFLOP optima", _isoflop(sweep)),
        section("All approaches", side_by_side(sweep.fit)),
        section("Tune stage", _tune(sweep)),
        section("Cells", _cells(sweep)),
        section("What each number counts", _conventions(sweep)),
        section("Where it came from", _provenance(sweep)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>Scaling laws: {escaped(name)}</title>\n<style>\n{_CSS.read_text()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _warnings(sweep: FinishedSweep) -> str:
    warnings = [escaped(warning) for warning in sweep.fit.warnings]
    if sweep.holdout is not None and not sweep.holdout["inside"]:
        warnings.append("The held-out run lies outside its 95 % prediction interval")
    if not warnings:
        return '<p class="quiet">No warnings.</p>'
    items = "".join(f"<li>{warning}.</li>" for warning in (warning.rstrip(".") for warning in warnings))
    count = f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}"
    return (
        f'<div class="alarm" role="alert"><strong>{count}: read before any number below</strong><ul>{items}</ul></div>'
    )


def _headline(sweep: FinishedSweep) -> str:
    law = law_named(sweep.fit.law)
    cards = [
        card(f"{number(value)}", f"{greek(name)}, {interval(sweep.fit.intervals[name])}")
        for name, value in sweep.fit.parameters.items()
    ]
    optima = [
        f"<li>At {number(part['budget'])} FLOP: N = {entry(part['n'], part['n_interval'], size)}, "
        f"D = {entry(part['d'], part['d_interval'], size)}, loss {part['loss']:.3f}.</li>"
        for part in (sweep.fit.isoflop["budgets"] if sweep.fit.isoflop else [])
    ]
    return (
        f'<p class="law">L = {formula(law.formula)} '
        f'<span class="quiet">({escaped(law.name)}: {escaped(law.source)})</span></p>'
        f'<div class="cards">{"".join(cards)}</div>'
        + (
            f"<p>Compute-optimal sizes, from parabolas at equal compute:</p><ul>{''.join(optima)}</ul>"
            if optima
            else ""
        )
        + _verdict(sweep)
    )


def _verdict(sweep: FinishedSweep) -> str:
    held_out = sweep.holdout
    if held_out is None:
        return "<p>No run was held out, so this law has not been tested beyond the cells it was fitted to.</p>"
    place = "inside" if held_out["inside"] else "outside"
    cards = (
        card(f"{held_out['predicted']:.3f}", f"predicted, mean {interval(held_out['mean_interval'])}"),
        card(f"{held_out['measured']:.3f}", f"measured, {place} {interval(held_out['prediction_interval'])}"),
        card(f"{held_out['error_percent']:+.2f} %".replace("-", "−"), "measured over predicted"),
    )
    return (
        f"<p>The held-out run (N = {number(held_out['n'])}, D = {number(held_out['d'])}, "
        f"C = {number(held_out['c'])} FLOP) was not read by the fit:</p>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _figure(drawn: Drawn, image_format: Format) -> str:
    if drawn.path is None:
        return f"<h3>{escaped(drawn.title)}</h3><p>{escaped(drawn.reason)}</p>"
    content = base64.b64encode(drawn.embedded).decode()
    return (
        f'<figure id="{drawn.name}"><h3>{escaped(drawn.title)}</h3>'
        f'<img style="width: {100 * drawn.width / WIDE:.0f}%" alt="{escaped(drawn.caption)}" '
        f'src="data:{_MIME[image_format]};base64,{content}">'
        f"<figcaption>{escaped(drawn.caption)}</figcaption></figure>"
    )


def _without_curve(sweep: FinishedSweep) -> str:
    if not sweep.without_curve:
        return ""
    return f'<p class="quiet">Without curve, for want of metrics.jsonl: {escaped(", ".join(sweep.without_curve))}.</p>'


def _parameters(sweep: FinishedSweep) -> str:
    fit = sweep.fit
    rows = [
        (greek(name), number(value), number(fit.standard_errors[name]), interval(fit.intervals[name]))
        for name, value in fit.parameters.items()
    ]
    return table(("parameter", "value", "standard error", "95 % interval"), rows)


def _fit_facts(sweep: FinishedSweep) -> str:
    fit = sweep.fit
    parts = (("Objective", fit.objective), ("Certificate", fit.certificate), ("Noise of log loss", fit.noise),
             ("Fitted range", fit.fitted_range))  # fmt: skip
    others = [
        (escaped(other["law"]), number(other["objective"]["value"]),
         ", ".join(f"{greek(name)} = {entry(value, other['intervals'][name])}"
                   for name, value in other["parameters"].items()))
        for other in fit.others
    ]  # fmt: skip
    return (
        _optima(sweep)
        + "".join(f"<h3>{title}</h3>{facts(part)}" for title, part in parts)
        + ("<h3>Other laws</h3>" + table(("law", "objective", "parameters"), others, text=(2,)) if others else "")
    )


def _optima(sweep: FinishedSweep) -> str:
    if not sweep.fit.derived:
        return "<p>This law says nothing about how to split compute between parameters and tokens.</p>"
    derived = sweep.fit.derived
    keys = ("n", "d", "tokens_per_parameter", "loss")
    rows = [
        (number(part["budget"]), *(entry(part[key]["value"], part[key]["interval"], size) for key in keys))
        for part in derived["optimum"]
    ]
    return (
        "<h3>Compute-optimal runs under the law</h3>"
        f"<p>With C = {number(derived['flops_per_nd'])} N D, the mean over the fitted cells:</p>"
        + _exponents(derived)
        + table(("budget (FLOP)", "N*", "D*", "tokens/parameter", "loss"), rows)
    )


def _exponents(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    a, b = (entry(found[name]["value"], found[name]["interval"]) for name in ("a", "b"))
    return f"<p>N* grows as C<sup>a</sup> with a = {a}, D* as C<sup>b</sup> with b = {b}.</p>"


def _isoflop(sweep: FinishedSweep) -> str:
    analysis = sweep.fit.isoflop
    if not analysis:
        return "<p>The fit has no IsoFLOP part: it needs budgets with several sizes each.</p>"
    column = sweep.columns["c"]
    rows = [
        (number(part["budget"]), entry(part["n"], part["n_interval"], size),
         entry(part["d"], part["d_interval"], size),
         number(part["tokens_per_parameter"]), f"{part['loss']:.4f}", str(len(part["points"])))
        for part in analysis["budgets"]
    ]  # fmt: skip
    head = (f"budget ({column}, FLOP)", "N*", "D*", "tokens/parameter", "loss", "points")
    refused = [(number(part["budget"]), escaped(part["reason"])) for part in analysis["refused"]]
    return (
        (table(head, rows) if rows else "<p>No budget gave a minimum.</p>")
        + ("<h3>Refused</h3>" + table((f"budget ({column}, FLOP)", "reason"), refused, text=(1,)) if refused else "")
        + _exponents(analysis["exponents"])
        + "".join(f"<p>{escaped(note)}.</p>" for note in analysis["notes"])
    )


def _tune(sweep: FinishedSweep) -> str:
    if sweep.tune is None:
        return "<p>The ladder had no tune stage: its learning rates are as the ladder states them.</p>"
    rule = sweep.tune["rule"]
    rows = sorted((row["n"], row["peak_lr"], row["loss"]) for row in sweep.tune["rows"])
    best = {n: min(loss for size, _, loss in rows if size == n) for n, _, _ in rows}
    return (
        f"<p>Rule: {escaped(rule['text'])} (coefficient {number(rule['coefficient'])}, "
        f"exponent {number(rule['exponent'])}). The best rate of each size is marked.</p>"
        + table(
            ("N", "peak learning rate", "loss"),
            [(number(n), number(rate), f"{loss:.4f}") for n, rate, loss in rows],
            marked=[loss == best[n] for n, _, loss in rows],
        )
    )


def _cells(sweep: FinishedSweep) -> str:
    shown = [name for name in _SHOWN if name in sweep.table and sweep.table[name].notna().any()]
    n, d, c, loss = (sweep.column(quantity) for quantity in ("n", "d", "c", "loss"))
    judged = (sweep.table["role"] != "baseline").to_numpy()
    predicted = np.full(len(loss), np.nan)
    predicted[judged] = fitted(sweep.fit, n[judged], d[judged], c[judged])
    errors = 100 * (loss / predicted - 1)
    head = ("cell", "role", "budget (FLOP)", "N", "D", "C (FLOP)", "loss", "predicted", "error (%)", *shown)
    rows = [
        (escaped(row["cell"]), escaped(row["role"]), number(row["budget"]), number(n[i]), number(d[i]), number(c[i]),
         f"{loss[i]:.4f}",
         *((f"{predicted[i]:.4f}", f"{errors[i]:+.2f}".replace("-", "−")) if judged[i] else ("", "")),
         *(number(row[name]) for name in shown))
        for i, row in enumerate(sweep.table.to_dict("records"))
    ]  # fmt: skip
    held_out = (sweep.table["role"] == "holdout").tolist()
    note = (
        "<p>The held-out run is marked. Cells of the tune stage are predicted too, "
        "though the law is not about their learning rates.</p>"
    )
    return note + table(head, rows, marked=held_out)


def _conventions(sweep: FinishedSweep) -> str:
    used = {*sweep.columns.values(), *_SHOWN}
    quantity = {column: key for key, column in sweep.columns.items()}
    rows = [
        (escaped(column.name), symbol(quantity[column.name]) if column.name in quantity else "", escaped(column.unit),
         escaped(column.meaning))
        for column in COLUMNS if column.name in used
    ]  # fmt: skip
    return table(("column", "here", "unit", "meaning"), rows, text=(1, 2, 3))


def _provenance(sweep: FinishedSweep) -> str:
    folder, parent = (shlex.quote(str(path)) for path in (sweep.folder, sweep.folder.parent))
    identity = {name: _unique(sweep, name) for name in _IDENTITY if _unique(sweep, name)}
    return (
        facts(identity)
        + f"<h3>Provenance of the fit</h3>{facts(sweep.fit.provenance)}"
        + (
            f"<details><summary>The whole ladder</summary>{facts(sweep.ladder)}</details>"
            if sweep.ladder
            else "<p>No ladder.json lies in the folder.</p>"
        )
        + f"<h3>Again</h3><pre>lm sweep LADDER.py --workdir {escaped(parent)}\nlm report {escaped(folder)}</pre>"
    )


def _unique(sweep: FinishedSweep, column: str) -> str:
    if column not in sweep.table:
        return ""
    return ", ".join(dict.fromkeys(str(value) for value in sweep.table[column].dropna()))
