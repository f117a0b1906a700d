"""Sweeps to one table: the `result.json` rows under run folders, in the declared column order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.base.errors import UsageError
from lm.scaling.read import FINGERPRINTS
from lm.scaling.table import NAMES

if TYPE_CHECKING:
    import pandas


def join(folders: Sequence[Path | str], *, mixed: bool = False) -> tuple["pandas.DataFrame", tuple[Path, ...]]:
    """The rows of all finished runs under `folders`, and the run folders (with a config.json) that have no row yet.

    Declared columns come first, in their order, unknown ones after them; a cell that is met twice counts once. Where
    a sweep's `table.csv` lies above a run, role, budget and the order of the rows are the ones it gives.

    Raises:
      UsageError: no such folder, no finished run, a damaged row, or fingerprints that differ (unless `mixed`).
    """
    import pandas

    rows, unfinished = {}, []
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
            rows[str(row.get("cell") or result.parent.resolve())] = row
    if not rows:
        raise UsageError(
            "no finished run (no result.json)",
            where=", ".join(map(str, folders)),
            do=f"{len(unfinished)} unfinished." if unfinished else "Pass sweep or run folders.",
        )
    table = pandas.DataFrame(list(rows.values()))
    for name in FINGERPRINTS:
        different = len(table[name].astype(str).unique()) if name in table else 0
        if different > 1 and not mixed:
            raise UsageError(
                f"{different} different values: losses with different fingerprints are never compared",
                where=f"column '{name}'",
                do="Join them all the same with --mixed.",
            )
    known = [name for name in NAMES if name in table]
    return table[known + [name for name in table if name not in NAMES]], tuple(unfinished)


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
