"""`report.html`: a finished sweep on one page that opens without network."""

import base64
import html
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.base.files import write_text
from lm.scaling.laws import law_named
from lm.scaling.pages.figures import WIDE, Drawn, fitted, write_figures
from lm.scaling.pages.finished import FinishedSweep, read_sweep
from lm.scaling.pages.style import Format, short
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
    write_text(path, page(sweep, list(write_figures(sweep, image_format)), image_format))
    return path


def page(sweep: FinishedSweep, figures: Sequence[Drawn], image_format: Format) -> str:
    """The whole page as text: warnings first, then the answer, the figures, the tables, where it all came from."""
    name = _unique(sweep, "sweep") or sweep.folder.resolve().name
    body = [
        f"<h1>Scaling laws of the sweep {_text(name)}</h1>",
        f'<p class="quiet">{len(sweep.table)} cells, {sweep.fit.points} of them fitted. '
        "Losses are validation cross-entropies in nats/token; intervals are 95 %.</p>",
        _warnings(sweep),
        _headline(sweep),
        _section("Figures", "".join(_figure(drawn, image_format) for drawn in figures) + _without_curve(sweep)),
        _section("The fit", _parameters(sweep) + _fit_facts(sweep)),
        _section("IsoFLOP optima", _isoflop(sweep)),
        _section("Tune stage", _tune(sweep)),
        _section("Cells", _cells(sweep)),
        _section("What each number counts", _conventions(sweep)),
        _section("Where it came from", _provenance(sweep)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>Scaling laws: {_text(name)}</title>\n<style>\n{_CSS.read_text()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _warnings(sweep: FinishedSweep) -> str:
    warnings = [_text(warning) for warning in sweep.fit.warnings]
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
        _card(f"{_number(value)}", f"{_greek(name)}, {_interval(sweep.fit.intervals[name])}")
        for name, value in sweep.fit.parameters.items()
    ]
    optima = [
        f"<li>At {_number(part['budget'])} FLOP: N = {_entry(part['n'], part['n_interval'], _short)}, "
        f"D = {_entry(part['d'], part['d_interval'], _short)}, loss {part['loss']:.3f}.</li>"
        for part in (sweep.fit.isoflop["budgets"] if sweep.fit.isoflop else [])
    ]
    return (
        f'<p class="law">L = {_formula(law.formula)} '
        f'<span class="quiet">({_text(law.name)}: {_text(law.source)})</span></p>'
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
        _card(f"{held_out['predicted']:.3f}", f"predicted, mean {_interval(held_out['mean_interval'])}"),
        _card(f"{held_out['measured']:.3f}", f"measured, {place} {_interval(held_out['prediction_interval'])}"),
        _card(f"{held_out['error_percent']:+.2f} %".replace("-", "−"), "measured over predicted"),
    )
    return (
        f"<p>The held-out run (N = {_number(held_out['n'])}, D = {_number(held_out['d'])}, "
        f"C = {_number(held_out['c'])} FLOP) was not read by the fit:</p>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _figure(drawn: Drawn, image_format: Format) -> str:
    if drawn.path is None:
        return f"<h3>{_text(drawn.title)}</h3><p>{_text(drawn.reason)}</p>"
    content = base64.b64encode(drawn.embedded).decode()
    return (
        f'<figure id="{drawn.name}"><h3>{_text(drawn.title)}</h3>'
        f'<img style="width: {100 * drawn.width / WIDE:.0f}%" alt="{_text(drawn.caption)}" '
        f'src="data:{_MIME[image_format]};base64,{content}">'
        f"<figcaption>{_text(drawn.caption)}</figcaption></figure>"
    )


def _without_curve(sweep: FinishedSweep) -> str:
    if not sweep.without_curve:
        return ""
    return f'<p class="quiet">Without curve, for want of metrics.jsonl: {_text(", ".join(sweep.without_curve))}.</p>'


def _parameters(sweep: FinishedSweep) -> str:
    fit = sweep.fit
    rows = [
        (_greek(name), _number(value), _number(fit.standard_errors[name]), _interval(fit.intervals[name]))
        for name, value in fit.parameters.items()
    ]
    return _table(("parameter", "value", "standard error", "95 % interval"), rows)


def _fit_facts(sweep: FinishedSweep) -> str:
    fit = sweep.fit
    parts = (("Objective", fit.objective), ("Certificate", fit.certificate), ("Noise of log loss", fit.noise),
             ("Fitted range", fit.fitted_range))  # fmt: skip
    others = [
        (_text(other["law"]), _number(other["objective"]["value"]),
         ", ".join(f"{_greek(name)} = {_entry(value, other['intervals'][name])}"
                   for name, value in other["parameters"].items()))
        for other in fit.others
    ]  # fmt: skip
    return (
        _optima(sweep)
        + "".join(f"<h3>{title}</h3>{_facts(facts)}" for title, facts in parts)
        + ("<h3>Other laws</h3>" + _table(("law", "objective", "parameters"), others, text=(2,)) if others else "")
    )


def _optima(sweep: FinishedSweep) -> str:
    if not sweep.fit.derived:
        return "<p>This law says nothing about how to split compute between parameters and tokens.</p>"
    derived = sweep.fit.derived
    keys = ("n", "d", "tokens_per_parameter", "loss")
    rows = [
        (_number(part["budget"]), *(_entry(part[key]["value"], part[key]["interval"], _short) for key in keys))
        for part in derived["optimum"]
    ]
    return (
        "<h3>Compute-optimal runs under the law</h3>"
        f"<p>With C = {_number(derived['flops_per_nd'])} N D, the mean over the fitted cells:</p>"
        + _exponents(derived)
        + _table(("budget (FLOP)", "N*", "D*", "tokens/parameter", "loss"), rows)
    )


def _exponents(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    a, b = (_entry(found[name]["value"], found[name]["interval"]) for name in ("a", "b"))
    return f"<p>N* grows as C<sup>a</sup> with a = {a}, D* as C<sup>b</sup> with b = {b}.</p>"


def _isoflop(sweep: FinishedSweep) -> str:
    analysis = sweep.fit.isoflop
    if not analysis:
        return "<p>The fit has no IsoFLOP part: it needs budgets with several sizes each.</p>"
    column = sweep.columns["c"]
    rows = [
        (_number(part["budget"]), _entry(part["n"], part["n_interval"], _short),
         _entry(part["d"], part["d_interval"], _short),
         _number(part["tokens_per_parameter"]), f"{part['loss']:.4f}", str(len(part["points"])))
        for part in analysis["budgets"]
    ]  # fmt: skip
    head = (f"budget ({column}, FLOP)", "N*", "D*", "tokens/parameter", "loss", "points")
    refused = [(_number(part["budget"]), _text(part["reason"])) for part in analysis["refused"]]
    return (
        (_table(head, rows) if rows else "<p>No budget gave a minimum.</p>")
        + ("<h3>Refused</h3>" + _table((f"budget ({column}, FLOP)", "reason"), refused, text=(1,)) if refused else "")
        + _exponents(analysis["exponents"])
        + "".join(f"<p>{_text(note)}.</p>" for note in analysis["notes"])
    )


def _tune(sweep: FinishedSweep) -> str:
    if sweep.tune is None:
        return "<p>The ladder had no tune stage: its learning rates are as the ladder states them.</p>"
    rule = sweep.tune["rule"]
    rows = sorted((row["n"], row["peak_lr"], row["loss"]) for row in sweep.tune["rows"])
    best = {n: min(loss for size, _, loss in rows if size == n) for n, _, _ in rows}
    return (
        f"<p>Rule: {_text(rule['text'])} (coefficient {_number(rule['coefficient'])}, "
        f"exponent {_number(rule['exponent'])}). The best rate of each size is marked.</p>"
        + _table(
            ("N", "peak learning rate", "loss"),
            [(_number(n), _number(rate), f"{loss:.4f}") for n, rate, loss in rows],
            marked=[loss == best[n] for n, _, loss in rows],
        )
    )


def _cells(sweep: FinishedSweep) -> str:
    shown = [name for name in _SHOWN if name in sweep.table and sweep.table[name].notna().any()]
    n, d, c, loss = (sweep.column(quantity) for quantity in ("n", "d", "c", "loss"))
    predicted = fitted(sweep.fit, n, d, c)
    errors = 100 * (loss / predicted - 1)
    head = ("cell", "role", "budget (FLOP)", "N", "D", "C (FLOP)", "loss", "predicted", "error (%)", *shown)
    rows = [
        (_text(row["cell"]), _text(row["role"]), _number(row["budget"]), _number(n[i]), _number(d[i]), _number(c[i]),
         f"{loss[i]:.4f}", f"{predicted[i]:.4f}", f"{errors[i]:+.2f}".replace("-", "−"),
         *(_number(row[name]) for name in shown))
        for i, row in enumerate(sweep.table.to_dict("records"))
    ]  # fmt: skip
    held_out = (sweep.table["role"] == "holdout").tolist()
    note = (
        "<p>The held-out run is marked. Cells of the tune stage are predicted too, "
        "though the law is not about their learning rates.</p>"
    )
    return note + _table(head, rows, marked=held_out)


def _conventions(sweep: FinishedSweep) -> str:
    used = {*sweep.columns.values(), *_SHOWN}
    quantity = {column: key for key, column in sweep.columns.items()}
    rows = [
        (_text(column.name), _symbol(quantity[column.name]) if column.name in quantity else "", _text(column.unit),
         _text(column.meaning))
        for column in COLUMNS if column.name in used
    ]  # fmt: skip
    return _table(("column", "here", "unit", "meaning"), rows, text=(1, 2, 3))


def _provenance(sweep: FinishedSweep) -> str:
    folder, parent = (shlex.quote(str(path)) for path in (sweep.folder, sweep.folder.parent))
    identity = {name: _unique(sweep, name) for name in _IDENTITY if _unique(sweep, name)}
    return (
        _facts(identity)
        + f"<h3>Provenance of the fit</h3>{_facts(sweep.fit.provenance)}"
        + (
            f"<details><summary>The whole ladder</summary>{_facts(sweep.ladder)}</details>"
            if sweep.ladder
            else "<p>No ladder.json lies in the folder.</p>"
        )
        + f"<h3>Again</h3><pre>lm sweep LADDER.py --workdir {_text(parent)}\nlm report {_text(folder)}</pre>"
    )


def _unique(sweep: FinishedSweep, column: str) -> str:
    if column not in sweep.table:
        return ""
    return ", ".join(dict.fromkeys(str(value) for value in sweep.table[column].dropna()))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _card(value: str, meaning: str) -> str:
    return f'<div class="card"><b>{value}</b><span>{meaning}</span></div>'


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = (), marked: Sequence[bool] = ()
) -> str:
    """Cells are HTML already; columns in `text` are set left and wrapped, `marked` rows stand out."""
    kind = [' class="text"' if at in text else "" for at in range(len(head))]
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="marked"' if number < len(marked) and marked[number] else ""
        lines.append(
            f"<tr{mark}>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        )
    top = "".join(f"<th{k}>{_text(title)}</th>" for k, title in zip(kind, head, strict=True))
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _facts(value: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td class="text">{_value(leaf)}</td></tr>' for name, leaf in _leaves(value)
    )
    return f'<div class="wide"><table>{rows}</table></div>'


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings, and lists of them, as dotted names; other lists are leaves."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        parts = [(str(at), part) for at, part in enumerate(value)]
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _number(value) if isinstance(value, float | int) or value is None else _text(value)


def _entry(
    value: float | None, interval: Sequence[float | None] | None, show: Callable[[Any], str] | None = None
) -> str:
    show = show or _number
    return f"{show(value)} {_interval(interval, show)}" if interval is not None else show(value)


def _interval(interval: Sequence[float | None] | None, show: Callable[[Any], str] | None = None) -> str:
    """An end that is None is unbounded."""
    if interval is None:
        return "no interval"
    low, high = ("unbounded" if end is None else (show or _number)(end) for end in interval)
    return f"[{low}, {high}]"


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return short(value) if value >= 1000 else f"{value:.4g}"


def _number(value: Any) -> str:
    """Four digits; a power of ten where plain digits would be hard to read."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < 1e7 and (value == int(value) or abs(value) >= 1000):
        shown = int(value) if value == int(value) else int(float(f"{value:.4g}"))
        return f"{shown:,}".replace("-", "−")
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:.4g}".replace("-", "−")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')} × 10<sup>{int(exponent)}</sup>".replace("-", "−")


def _formula(formula: str) -> str:
    parts = (part.partition("^") for part in formula.split())
    return " ".join(_text(base) + (f"<sup>{_greek(power)}</sup>" if power else "") for base, _, power in parts)


def _greek(name: str) -> str:
    names = {"alpha": "α", "beta": "β"}
    return names[name] if name in names else _text(name)


def _symbol(quantity: str) -> str:
    return {"n": "N", "d": "D", "c": "C", "loss": "L"}[quantity]


def _text(text: Any) -> str:
    return html.escape(str(text))
