"""A finished sweep's folder, read whole and checked: what figures, report and notebook look at."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm.base.errors import UsageError
from lm.base.files import read_object
from lm.scaling.join import training_rows
from lm.scaling.result import FitResult

_HELD_OUT = (
    "n", "d", "c", "predicted", "mean_interval", "prediction_interval", "measured", "error_percent", "inside",
)  # fmt: skip
_DO = "Finish the sweep first: lm sweep LADDER.py --workdir DIR."


@dataclasses.dataclass(frozen=True)
class Curve:
    """One cell on its way: training loss in nats/token against tokens and FLOP, and the evaluated loss at the end.

    FLOP at a step are the cell's total in the table times the share of its tokens seen by then.
    """

    cell: str
    role: str
    n: float
    tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray
    final: tuple[float, float, float]  # tokens, FLOP, evaluated loss


@dataclasses.dataclass(frozen=True)
class FinishedSweep:
    """Everything a sweep left: its run table, its fit, and the parts that it may lack as None or an empty tuple."""

    folder: Path
    table: pd.DataFrame
    fit: FitResult
    columns: dict[str, str]  # n, d, c, loss -> the column of the table that the fit took it from
    curves: tuple[Curve, ...]
    without_curve: tuple[str, ...]  # cells of the table whose metrics.jsonl is not there
    holdout: dict[str, Any] | None
    tune: dict[str, Any] | None
    ladder: dict[str, Any] | None

    def column(self, quantity: str, *roles: str) -> np.ndarray:
        """The table's values of `n`, `d`, `c` or `loss` for cells of these roles (none given: all), float64."""
        rows = self.table[self.table["role"].isin(roles)] if roles else self.table
        return rows[self.columns[quantity]].to_numpy(dtype=float)


def read_sweep(folder: Path | str) -> FinishedSweep:
    """Reads a sweep's folder: `table.csv` and `fit.json` are needed, the other parts may be absent.

    Raises:
      UsageError: the folder or one of the two files is not there, or a file is not what its name says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError("there is no such sweep folder", where=str(folder), do=_DO)
    table = _read_table(folder / "table.csv")
    fit = _read_fit(folder / "fit.json")
    columns = {quantity: fit.provenance["columns"][quantity] for quantity in ("n", "d", "c", "loss")}
    if None in columns.values():
        raise UsageError("the fit derived one of n, d and c by a rule, so the table does not hold it",
                         where=str(folder / "fit.json"), do="Fit again with --n, --d and --c.")  # fmt: skip
    absent = [column for column in columns.values() if column not in table]
    if absent:
        raise UsageError(f"the fit was made from columns that the table lacks: {', '.join(absent)}",
                         where=str(folder / "table.csv"), do="Fit this table again.")  # fmt: skip
    read = [(row["cell"], _read_curve(folder / row["cell"], row, columns)) for row in table.to_dict("records")]
    return FinishedSweep(
        folder=folder,
        table=table,
        fit=fit,
        columns=columns,
        curves=tuple(curve for _, curve in read if curve is not None),
        without_curve=tuple(cell for cell, curve in read if curve is None),
        holdout=_read_json(folder / "holdout.json", _HELD_OUT),
        tune=_read_json(folder / "tune.json", ("rows", "rule")),
        ladder=_read_json(folder / "ladder.json"),
    )


def _read_table(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise UsageError("the sweep has no run table", where=str(path), do=_DO)
    try:
        table = pd.read_csv(path, dtype={"cell": str})
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise UsageError(f"not a CSV table: {error}", where=str(path)) from error
    absent = [name for name in ("cell", "role", "budget") if name not in table]
    if absent:
        raise UsageError(f"not a sweep's table: without {', '.join(absent)}", where=str(path), do=_DO)
    if table.empty:
        raise UsageError("the run table has no row", where=str(path), do=_DO)
    return table


def _read_fit(path: Path) -> FitResult:
    if not path.is_file():
        raise UsageError("the sweep has no fit", where=str(path), do=f"{_DO} Or run lm fit.")
    return FitResult.load(path)


def _read_json(path: Path, needed: Sequence[str] = ()) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = read_object(path, "Delete it and run the sweep again.")
    absent = [name for name in needed if name not in value]
    if absent:
        raise UsageError(f"without {', '.join(absent)}", where=str(path), do="Delete it and run the sweep again.")
    return value


def _read_curve(folder: Path, row: Mapping[Any, Any], columns: dict[str, str]) -> Curve | None:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    train = [(entry["tokens"], entry["loss"]) for entry in training_rows(path)]
    if not train:
        return None
    tokens, loss = np.array(train, dtype=float).T
    flops_a_token = row[columns["c"]] / row[columns["d"]]
    final = (row[columns["d"]], row[columns["c"]], row[columns["loss"]])
    return Curve(row["cell"], row["role"], row[columns["n"]], tokens, tokens * flops_a_token, loss, final)
