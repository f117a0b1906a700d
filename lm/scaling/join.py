"""Sweeps to one table: the `result.json` rows under run folders, or their training curves, in the declared order."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.base.errors import UsageError
from lm.scaling.read import FINGERPRINTS
from lm.scaling.table import NAMES

if TYPE_CHECKING:
    import pandas

# What a run has once, at its end: no columns of a curve.
OF_THE_END = ("train_loss", "loss_se", "bits_per_byte", "wall_seconds", "tokens_per_second", "mfu", "peak_flops")
TRAINING_LOSS = "training"  # in place of the evaluation text's fingerprint


def join(folders: Sequence[Path | str], *, mixed: bool = False) -> tuple["pandas.DataFrame", tuple[Path, ...]]:
    """The rows of all finished runs under `folders`, and the run folders (with a config.json) that have no row yet.

    Declared columns come first, in their order, unknown ones after them; a cell that is met twice counts once. Where
    a sweep's `table.csv` lies above a run, role, budget and the order of the rows are the ones it gives.

    Raises:
      UsageError: no such folder, no finished run, a damaged row, or fingerprints that differ (unless `mixed`).
    """
    rows, unfinished = _finished(folders)
    return _table([row for _, row in rows], mixed), unfinished


def join_curves(folders: Sequence[Path | str], *, mixed: bool = False) -> tuple["pandas.DataFrame", tuple[Path, ...]]:
    """A row for each logged training step of each finished run, and the run folders that gave none.

    Columns are those of `join` at that step: tokens and steps so far, FLOP in proportion to the tokens, `loss` the
    training loss of the logging interval in nats/token, `lr_fraction`, and `decayed` only where the run ended.

    Raises:
      UsageError: as `join`; a damaged metrics.jsonl.
    """
    finished, unfinished = _finished(folders)
    found, without = [], []
    for folder, row in finished:
        path = folder / "metrics.jsonl"
        steps = training_rows(path) if path.is_file() else []
        if not steps:
            without.append(folder)
        found += [_at_step(row, step) for step in steps]
    if not found:
        raise UsageError("no finished run has a metrics.jsonl", where=", ".join(map(str, folders)))
    return _table(found, mixed), (*unfinished, *without)


def training_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of kind `train` of a metrics.jsonl whose loss is finite.

    A run that was killed in the middle of a write leaves a last line without its end: that line is left out.

    Raises:
      UsageError: another line is not JSON.
    """
    rows = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise UsageError(f"line {number} is not JSON: {error}", where=str(path),
                                 do="Delete the cell's folder and run the sweep again.") from error  # fmt: skip
    train = [{**row, "loss": float(row["loss"])} for row in rows if row["kind"] == "train"]
    return [row for row in train if math.isfinite(row["loss"])]  # a loss that was not finite is written as text


def _at_step(row: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    share = step["tokens"] / row["tokens"]
    flops = {name: value * share for name, value in row.items() if name.startswith("flops_")}
    kept = {name: value for name, value in row.items() if name not in OF_THE_END}
    return kept | flops | {
        "tokens": step["tokens"],
        "tokens_unique": min(step["tokens"], row.get("tokens_unique", step["tokens"])),
        "steps": step["step"],
        "loss": step["loss"],
        "lr_fraction": step["lr"] / row["peak_lr"],
        "decayed": int(step["step"] >= row["steps"] and row["decayed"]),
        "evaluation": TRAINING_LOSS,
    }  # fmt: skip


def _finished(folders: Sequence[Path | str]) -> tuple[list[tuple[Path, dict[str, Any]]], tuple[Path, ...]]:
    """The run folders with their rows, a cell that is met twice once, and the folders of unfinished runs."""
    rows: dict[str, tuple[Path, dict[str, Any]]] = {}
    unfinished = []
    sweeps: dict[Path, dict[str, dict[str, Any]]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UsageError("there is no such folder", where=str(folder), do="Pass sweep or run folders.")
        for config in sorted(folder.rglob("config.json")):
            result = config.with_name("result.json")
            if not result.is_file():
                unfinished.append(config.parent)
        results = sorted(folder.rglob("result.json"))
        for sweep in {result.parent.parent for result in results} - set(sweeps):
            sweeps[sweep] = _served(sweep / "table.csv")
        places = {run: place for served in sweeps.values() for place, run in enumerate(served)}
        for result in sorted(results, key=lambda at: (at.parent.parent, places.get(at.parent.name, len(places)))):
            row = _row(result) | sweeps[result.parent.parent].get(result.parent.name, {})
            rows[str(row.get("cell") or result.parent.resolve())] = (result.parent, row)
    if not rows:
        raise UsageError(
            "no finished run (no result.json)",
            where=", ".join(map(str, folders)),
            do=f"{len(unfinished)} unfinished." if unfinished else "Pass sweep or run folders.",
        )
    return list(rows.values()), tuple(unfinished)


def _table(rows: Iterable[dict[str, Any]], mixed: bool) -> "pandas.DataFrame":
    import pandas

    table = pandas.DataFrame(rows)
    for name in FINGERPRINTS:
        different = len(table[name].astype(str).unique()) if name in table else 0
        if different > 1 and not mixed:
            raise UsageError(
                f"{different} different values: losses with different fingerprints are never compared",
                where=f"column '{name}'",
                do="Join them all the same with --mixed.",
            )
    known = [name for name in NAMES if name in table]
    return table[known + [name for name in table if name not in NAMES]]


def _row(path: Path) -> dict[str, Any]:
    do = "Delete it and run the same command again."
    try:
        row = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"is damaged, not JSON: {error}", where=str(path), do=do) from error
    if not isinstance(row, dict) or "loss" not in row:
        raise UsageError("is damaged: no row of the run table", where=str(path), do=do)
    return row


def _served(path: Path) -> dict[str, dict[str, Any]]:
    """Role and budget of each cell of a sweep's table, in its order; a result.json has those of the cell's first use.

    A file of that name that is no run table says nothing.
    """
    import pandas

    if not path.is_file():
        return {}
    try:
        table = pandas.read_csv(path, dtype={"cell": str})
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"is not a CSV table: {error}", where=str(path)) from error
    if not {"cell", "role", "budget"} <= set(table):
        return {}
    named = table[["cell", "role", "budget"]].dropna().to_dict("records")
    return {str(row["cell"]): {"role": row["role"], "budget": row["budget"]} for row in named}
