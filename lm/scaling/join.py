"""Sweeps to one table: the `result.json` rows under run folders, in the declared column order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm.base.errors import UsageError
from lm.scaling.read import FINGERPRINTS
from lm.scaling.table import NAMES

if TYPE_CHECKING:
    import pandas


def join(folders: Sequence[Path | str], *, mixed: bool = False) -> tuple["pandas.DataFrame", tuple[Path, ...]]:
    """The rows of all finished runs under `folders`, and the run folders (with a config.json) that have no row yet.

    Declared columns come first, in their order, unknown ones after them; a cell that is met twice counts once.

    Raises:
      UsageError: no such folder, no finished run, a row that is not JSON, or fingerprints that differ (unless `mixed`).
    """
    import pandas

    rows, unfinished = {}, []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UsageError("there is no such folder", where=str(folder), do="Pass sweep or run folders.")
        for config in sorted(folder.rglob("config.json")):
            result = config.with_name("result.json")
            if not result.is_file():
                unfinished.append(config.parent)
        for result in sorted(folder.rglob("result.json")):
            try:
                row = json.loads(result.read_text())
            except ValueError as error:
                raise UsageError(f"is not JSON: {error}", where=str(result)) from error
            if not isinstance(row, dict):
                raise UsageError("is not a row of the run table", where=str(result))
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
