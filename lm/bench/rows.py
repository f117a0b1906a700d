"""What a benchmark says: rows of ours against peers and a limit, as JSON and as a table with the noise beside."""

import dataclasses
import enum
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import rich.console
import rich.table
from rich.markup import escape

from lm.base import files
from lm.base.errors import UsageError

Case = TypeVar("Case", bound="Named")


class Unit(enum.StrEnum):
    """What a number counts; of rates more is better, of seconds less."""

    TOKENS_PER_SECOND = "tokens/s"
    MEGATOKENS_PER_SECOND = "Mtok/s"
    SECONDS = "s"

    def ratio(self, ours: float, other: float) -> float:
        """How many times better ours is: above 1 means faster."""
        return other / ours if self is Unit.SECONDS else ours / other

    def best(self, values: Mapping[str, float]) -> str:
        """The name of the fastest."""
        return (min if self is Unit.SECONDS else max)(values, key=values.__getitem__)


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: samples of ours and of each peer, taken in turn, so that sample i of all belongs to round i.

    `limit` is what no program of this kind exceeds here, described by `limit_is`; `missing` maps a peer that did not
    take part to the reason; `note` says what else a reader must know.
    """

    case: str
    dtype: str
    unit: Unit
    ours: Sequence[float]
    peers: Mapping[str, Sequence[float]]
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit: float | None = None
    limit_is: str = "none stated"
    note: str = ""

    @property
    def medians(self) -> dict[str, float]:
        """The median of each peer's samples."""
        return {name: statistics.median(samples) for name, samples in self.peers.items()}

    @property
    def ratio_to_best_peer(self) -> float | None:
        """Median of ours against the best median; None without a peer."""
        medians = self.medians
        return self.unit.ratio(self.median, medians[self.unit.best(medians)]) if medians else None

    @property
    def median(self) -> float:
        """The median of our samples."""
        return statistics.median(self.ours)

    @property
    def share_of_limit(self) -> float | None:
        """Ours over the limit (for seconds, the limit over ours)."""
        return None if self.limit is None else self.unit.ratio(self.median, self.limit)

    def to_json(self) -> dict[str, Any]:
        """The row in the command's contract, and beside it what its numbers rest on."""
        return {
            "case": self.case,
            "dtype": self.dtype,
            "unit": self.unit.value,
            "ours": self.median,
            "peers": self.medians,
            "ratio_to_best_peer": self.ratio_to_best_peer,
            "limit": self.limit,
            "share_of_limit": self.share_of_limit,
            "limit_is": self.limit_is,
            "missing": dict(self.missing),
            "note": self.note,
            "noise": {"ours": _noise(self.ours), **{name: _noise(samples) for name, samples in self.peers.items()}},
            "paired_ratios": {name: _noise(self.paired(samples)) for name, samples in self.peers.items()},
        }

    def paired(self, samples: Sequence[float]) -> list[float]:
        """The ratio in each round: what slows a whole round cancels."""
        return [self.unit.ratio(ours, other) for ours, other in zip(self.ours, samples, strict=False)]


class Named(Protocol):
    """Something that a benchmark can be narrowed down to."""

    @property
    def name(self) -> str: ...


def chosen(cases: Sequence[Case], only: str) -> list[Case]:
    """Those of `cases` whose name holds `only`.

    Raises:
      UsageError: none of them.
    """
    found = [case for case in cases if only in case.name]
    if not found:
        names = ", ".join(case.name for case in cases)
        raise UsageError(f"no case is called like '{only}'", where="--only", do=f"There are {names}.")
    return found


def write(path: Path, what: str, rows: Sequence[Row], machine: Mapping[str, Any], peers: Mapping[str, Any]) -> None:
    """Writes the rows with the machine's facts and what each peer said of itself, whole or not at all."""
    files.write_json(
        path,
        {"what": what, "machine": dict(machine), "peers": dict(peers), "rows": [row.to_json() for row in rows]},
    )


def show(rows: Sequence[Row], console: rich.console.Console) -> None:
    """Prints a table for each row: who, the median, the least and greatest sample, how many times faster ours is."""
    for row in rows:
        title = ", ".join(part for part in (row.case, row.dtype, row.unit.value) if part)
        table = rich.table.Table(title=escape(title), title_justify="left", title_style="bold")
        table.add_column("")
        for column in ("median", "min", "max", "ours is", "in each round"):
            table.add_column(column, justify="right")
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%} of limit"
        table.add_row("ours", *_numbers(row.ours), share, "", style="bold")
        for name in sorted(row.peers, key=row.medians.__getitem__, reverse=row.unit is not Unit.SECONDS):
            samples, pairs = row.peers[name], row.paired(row.peers[name])
            ratio = row.unit.ratio(row.median, row.medians[name])
            table.add_row(escape(name), *_numbers(samples), f"{ratio:.2f}x", f"{min(pairs):.2f}-{max(pairs):.2f}")
        for name in row.missing:
            table.add_row(escape(name), "MISSING", style="red")
        if row.limit is not None:
            table.add_row("limit", _short(row.limit), style="dim")
        console.print(table)
        # Sentences stand below: in a cell they would be broken over many lines.
        if row.limit is not None:
            console.print(escape(f"limit: {row.limit_is}"), style="dim")
        if row.note:
            console.print(escape(f"note: {row.note}"), style="dim")
        for name, reason in row.missing.items():
            console.print(escape(f"MISSING {name}: {reason}"), style="red")
        console.print()


def _noise(samples: Sequence[float]) -> dict[str, Any]:
    return {
        "min": min(samples),
        "median": statistics.median(samples),
        "max": max(samples),
        "samples": [float(f"{sample:.6g}") for sample in samples],
    }


def _numbers(samples: Sequence[float]) -> tuple[str, str, str]:
    return _short(statistics.median(samples)), _short(min(samples)), _short(max(samples))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
