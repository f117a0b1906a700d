"""How a value and its interval are written in plain text, everywhere in this room."""

from collections.abc import Mapping, Sequence
from typing import Any


def span(value: float | None, ends: Sequence[float | None] | None) -> str:
    """'1.5 [1.2, 1.9]'; without `ends` the value alone, and None is unbounded."""
    shown = "unbounded" if value is None else f"{value:.5g}"
    if ends is None:
        return shown
    low, high = ("unbounded" if end is None else f"{end:.4g}" for end in ends)
    return f"{shown} [{low}, {high}]"


def entry(part: Mapping[str, Any]) -> str:
    """`span` of a {value, interval}."""
    return span(part["value"], part["interval"])
