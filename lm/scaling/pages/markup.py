"""Numbers, tables and sections of a report as HTML."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm.scaling.pages.style import short


def section(title: str, body: str) -> str:
    """A section under a heading; `body` is HTML."""
    return f"<section><h2>{title}</h2>{body}</section>"


def card(value: str, meaning: str) -> str:
    """A value that stands out, over what it means."""
    return f'<div class="card"><b>{value}</b><span>{meaning}</span></div>'


def table(
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
    top = "".join(f"<th{k}>{escaped(title)}</th>" for k, title in zip(kind, head, strict=True))
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def facts(value: Mapping[str, Any]) -> str:
    """A table of names and values, nested ones by dotted names."""
    rows = "".join(
        f'<tr><td>{escaped(name)}</td><td class="text">{shown(leaf)}</td></tr>' for name, leaf in _leaves(value)
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


def shown(value: Any) -> str:
    """Any plain value as text."""
    if isinstance(value, list):
        return ", ".join(shown(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, float | int) or value is None else escaped(value)


def entry(value: float | None, ends: Sequence[float | None] | None, show: Callable[[Any], str] | None = None) -> str:
    """A value with its interval, where it has one."""
    show = show or number
    return f"{show(value)} {interval(ends, show)}" if ends is not None else show(value)


def interval(ends: Sequence[float | None] | None, show: Callable[[Any], str] | None = None) -> str:
    """An end that is None is unbounded."""
    if ends is None:
        return "no interval"
    low, high = ("unbounded" if end is None else (show or number)(end) for end in ends)
    return f"[{low}, {high}]"


def size(value: float | None) -> str:
    """A count with a unit prefix, a small number as it is."""
    if value is None:
        return "–"
    return short(value) if value >= 1000 else f"{value:.4g}"


def number(value: Any) -> str:
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


def formula(formula: str) -> str:
    """A law with its exponents raised."""
    parts = (part.partition("^") for part in formula.split())
    return " ".join(escaped(base) + (f"<sup>{greek(power)}</sup>" if power else "") for base, _, power in parts)


def greek(name: str) -> str:
    """The letter of a parameter."""
    names = {"alpha": "α", "beta": "β"}
    return names[name] if name in names else escaped(name)


def symbol(quantity: str) -> str:
    """The symbol of n, d, c or loss."""
    return {"n": "N", "d": "D", "c": "C", "loss": "L"}[quantity]


def escaped(text: Any) -> str:
    """Any text, safe within HTML."""
    return html.escape(str(text))
