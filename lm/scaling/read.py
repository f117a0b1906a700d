"""Anybody's table in, checked float64 points out: nothing is dropped without a word."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError

if TYPE_CHECKING:
    import pandas

Array = np.ndarray

FINGERPRINTS = ("corpus", "tokenizer", "evaluation")
CONVENTION = "c = 6 n d"
MIN_STEPS = 1000
FARTHEST_FROM_6ND = 50.0  # times either way: no counting rule takes c further from 6 n d than the smallest models do
USUAL_LOSS = 0.05, 12.0  # nats/token: from nearly certain text to one of 160,000 equally likely tokens
SAME = 1e-6  # e-folds: values that are closer are one value


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which column of a table holds what; of `n`, `d` and `c` one may be None and follows from c = 6 n d.

    `u` (distinct training tokens) is only read by laws of repeated data. The defaults are the names of our own run
    table.
    """

    n: str | None = "params_total"
    d: str | None = "tokens"
    c: str | None = "flops_matmul"
    loss: str = "loss"
    u: str | None = None


@dataclasses.dataclass(frozen=True)
class Points:
    """The checked points of a fit: float64 arrays of shape [points] (parameters, tokens, FLOP, nats/token).

    `table` keeps the rows they came from, in the same order; `conventions` says where each quantity came from.
    """

    n: Array
    d: Array
    c: Array
    loss: Array
    table: "pandas.DataFrame"
    columns: Columns
    conventions: tuple[str, ...]
    warnings: tuple[str, ...]
    u: Array | None = None

    def variable(self, name: str) -> Array:
        """What a law calls n, d, c or u: [points].

        Raises:
          UsageError: u, where no column of distinct tokens was given.
        """
        if name == "u" and self.u is None:
            raise UsageError(
                "the law needs the distinct training tokens", where="columns", do="Name them with --u COL."
            )
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self.loss)

    def subset(self, chosen: Array) -> "Points":
        """The points of a mask or of indices, with the rows that they came from."""
        return dataclasses.replace(
            self,
            n=self.n[chosen],
            d=self.d[chosen],
            c=self.c[chosen],
            loss=self.loss[chosen],
            u=None if self.u is None else self.u[chosen],
            table=self.table.iloc[chosen],
        )

    @property
    def flops_per_nd(self) -> float:
        """The factor k of c = k n d: the geometric mean over the points (6 when c was derived)."""
        return float(np.exp(np.mean(np.log(self.c) - np.log(self.n) - np.log(self.d))))


def read_table(path: Path | str) -> "pandas.DataFrame":
    """Reads a CSV, TSV, JSON-lines or Parquet file (by its ending, `.gz` and `.xz` too).

    Raises:
      UsageError: no such file, an unknown ending, or a file that does not parse.
    """
    import pandas

    path = Path(path)
    if not path.is_file():
        raise UsageError("there is no such table", where=str(path), do="Pass a CSV, JSONL or Parquet file.")
    needed = "Give a header row and a row for each run."
    endings = [ending for ending in path.suffixes if ending not in (".gz", ".xz")]
    kind = endings[-1].lower() if endings else ""
    readers: dict[str, Callable[[Path], pandas.DataFrame]] = {
        ".csv": _read_separated,
        ".tsv": lambda file: _read_separated(file, "\t"),
        ".jsonl": lambda file: pandas.read_json(file, lines=True),
        ".parquet": pandas.read_parquet,
    }
    if kind not in readers:
        raise UsageError(
            f"do not know how to read '{kind or path.name}'", where=str(path), do=f"Known: {', '.join(readers)}."
        )
    try:
        table = readers[kind](path)
    except (ValueError, OSError, UnicodeDecodeError) as error:
        what = f"is not a readable {kind[1:]} file: {_one_line(error)}"
        raise UsageError(what, where=str(path), do=needed) from error
    if len(table) == 0:
        raise UsageError("the table has no rows", where=str(path), do=needed)
    if len(table.columns) == 1 and ";" in str(table.columns[0]):
        what = f"has one column, '{table.columns[0]}': its values are separated by ';'"
        raise UsageError(what, where=str(path), do="Separate them by commas.")
    return table


def _read_separated(path: Path, separator: str = ",") -> "pandas.DataFrame":
    import pandas

    names = pandas.read_csv(path, sep=separator, header=None, nrows=1, dtype=str).iloc[0].dropna()
    if names.duplicated().any():  # pandas would call the second one 'loss.1' and say nothing
        raise UsageError(
            f"two columns are called '{names[names.duplicated()].iloc[0]}'", where=str(path), do="Rename one."
        )
    return pandas.read_csv(path, sep=separator)


def sha256_table(table: "pandas.DataFrame") -> str:
    """The SHA-256 of a table's values as CSV, in hex: what `fit.json` names its data by."""
    return hashlib.sha256(table.to_csv(index=False).encode()).hexdigest()


def select(table: "pandas.DataFrame", where: str | None) -> "pandas.DataFrame":
    """The rows for which the pandas query `where` holds, each keeping its row number (from 1) as index label.

    Raises:
      UsageError: the expression does not evaluate to true or false for each row, or no row is left.
    """
    import pandas

    table = table.set_axis(np.arange(1, len(table) + 1), axis=0)
    if where is None:
        return table
    try:
        mask: Any = table.eval(where, local_dict={}, global_dict={})  # columns only: no variable of ours is in reach
    except Exception as error:  # a query evaluates the user's text: anything can come out of it
        raise UsageError(
            f"'{where}' does not evaluate: {_one_line(error)}",
            where="--where",
            do=f"Columns: {', '.join(map(str, table.columns))}.",
        ) from error
    if np.shape(mask) != (len(table),) or not pandas.api.types.is_bool_dtype(mask):
        raise UsageError(f"'{where}' is not true or false for each row", where="--where", do="Compare: 'n > 1e7'.")
    chosen = table.loc[mask]
    if len(chosen) == 0:
        raise UsageError(f"no row of {len(table)} satisfies '{where}'", where="--where", do="Choose more.")
    return chosen


def points(table: "pandas.DataFrame", columns: Columns, where: str | None = None) -> Points:
    """Maps, casts to float64 and checks; every refusal names the rows (the first data row is row 1).

    Raises:
      UsageError: a missing column, a value that is no positive number, mixed fingerprints, or units plainly off.
    """
    chosen = select(table, where)
    for name in FINGERPRINTS:
        if name in chosen and (different := len(chosen[name].astype(str).unique())) > 1:
            empty = chosen[name].isna().to_numpy()
            told = f"empty in {rows(empty, chosen)}" if empty.any() else f"{different} different values"
            raise UsageError(
                f"{told}: losses with different fingerprints are never compared",
                where=f"column '{name}'",
                do=f"Choose one with --where \"{name} == '...'\".",
            )
    given = {key: name for key, name in (("n", columns.n), ("d", columns.d), ("c", columns.c)) if name is not None}
    if len(given) < 2:
        raise UsageError(
            "two of --n, --d and --c are needed", where="columns", do=f"The third follows from {CONVENTION}."
        )
    values = {key: numbers(chosen, name, f"--{key}") for key, name in given.items()}
    loss = numbers(chosen, columns.loss, "--loss")
    conventions = [f"{key}: column '{name}'" for key, name in given.items()] + [
        f"loss: column '{columns.loss}', nats/token"
    ]
    missing = ({"n", "d", "c"} - set(given)).pop() if len(given) == 2 else None
    if missing:
        values[missing] = {
            "n": lambda: values["c"] / (6 * values["d"]),
            "d": lambda: values["c"] / (6 * values["n"]),
            "c": lambda: 6 * values["n"] * values["d"],
        }[missing]()
        conventions.append(f"{missing}: from {CONVENTION}")
    _check_units(values, loss, chosen, columns)
    u = None if columns.u is None else numbers(chosen, columns.u, "--u")
    if u is not None:
        conventions.append(f"u: column '{columns.u}', distinct training tokens")
        if (u > values["d"] * (1 + 1e-6)).any():
            raise UsageError(
                f"more distinct tokens than tokens in {rows(u > values['d'] * (1 + 1e-6), chosen)}",
                where=f"column '{columns.u}'",
                do="u counts each training token once: u <= d.",
            )
    return Points(
        values["n"],
        values["d"],
        values["c"],
        loss,
        chosen,
        columns,
        tuple(conventions),
        tuple(_warnings(values, loss, chosen, repetition=u is not None)),
        u,
    )


def cluster_codes(chosen: "pandas.DataFrame", name: str) -> Array:
    """Integer codes [points] of a column's values, for a bootstrap by cluster.

    Raises:
      UsageError: no such column, a missing value, or fewer than two clusters.
    """
    _require(chosen, name, "--cluster")
    if chosen[name].isna().any():
        raise UsageError(f"no value in {rows(chosen[name].isna().to_numpy(), chosen)}", where=f"column '{name}'")
    codes = np.unique(chosen[name].astype(str).to_numpy(), return_inverse=True)[1]
    if codes.max() < 1:
        raise UsageError("all rows are in one cluster", where=f"column '{name}'", do="Choose another column, or none.")
    return codes


def rows(mask: Array, table: "pandas.DataFrame") -> str:
    """'rows 3, 17' for the rows where `mask` [points] holds; a long list is cut and counted."""
    labels = [str(label) for label in table.index[np.asarray(mask, bool)]]
    shown = ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")
    return f"row{'s' if len(labels) > 1 else ''} {shown}"


def repeats(found: Points) -> Array:
    """Group codes [points]: equal where n, d (and u) are equal to six digits; used for seed noise."""
    columns = [column for column in (found.n, found.d, found.u) if column is not None]
    keys = np.round(np.log(np.stack(columns, axis=1)), 6)
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)


def optional(table: "pandas.DataFrame", name: str) -> Array:
    """A column [points] that only helps, in float64; NaN where it holds no number."""
    import pandas

    return pandas.to_numeric(table[name], errors="coerce").to_numpy(np.float64)


def _require(table: "pandas.DataFrame", name: str, flag: str) -> None:
    if name not in table:
        raise UsageError(
            f"there is no column '{name}'", where=flag, do=nearest(name, [str(known) for known in table.columns])
        )


def numbers(table: "pandas.DataFrame", name: str, flag: str) -> Array:
    """A column [points] of positive numbers in float64.

    Raises:
      UsageError: no such column, or rows without a positive number.
    """
    import pandas

    _require(table, name, flag)
    column = table[name]
    cast = pandas.to_numeric(column, errors="coerce").to_numpy(np.float64)
    checks: Sequence[tuple[Any, str]] = (
        (np.isnan(cast) & column.notna().to_numpy(), "not a number"),
        (np.isnan(cast), "no value"),
        (~np.isfinite(cast), "infinite"),
        (cast <= 0, "not positive"),
    )
    for bad, what in checks:
        if bad.any():
            raise UsageError(
                f"{what} in {rows(bad, table)} (for example {np.asarray(column.to_numpy()[bad][0]).item()!r})",
                where=f"column '{name}'",
                do="Repair the rows, or leave them out with --where.",
            )
    return cast


def _check_units(values: dict[str, Array], loss: Array, table: "pandas.DataFrame", columns: Columns) -> None:
    names = {"n": columns.n, "d": columns.d, "c": columns.c}
    for key, least, unit in (("n", 1e3, "parameters"), ("d", 1e3, "tokens"), ("c", 1e6, "FLOP")):
        low = values[key] < least
        if low.any():
            source = f"column '{names[key]}'" if names[key] else f"{key} from {CONVENTION}"
            raise UsageError(
                f"under {least:g} {unit} in {rows(low, table)}: the unit looks like thousands, millions or billions",
                where=source,
                do=f"Give plain {unit}.",
            )
    if (loss > 20).any():
        raise UsageError(
            f"over 20 nats/token in {rows(loss > 20, table)}: that looks like perplexity",
            where=f"column '{columns.loss}'",
            do="Give the cross-entropy in nats/token.",
        )
    ratio = values["c"] / (6 * values["n"] * values["d"])
    far = (ratio < 1 / FARTHEST_FROM_6ND) | (ratio > FARTHEST_FROM_6ND)
    if far.any():
        raise UsageError(
            f"c / (6 n d) is outside 1/{FARTHEST_FROM_6ND:g} to {FARTHEST_FROM_6ND:g} in {rows(far, table)} "
            f"(for example {ratio[far][0]:.3g})",
            where=f"columns {list(names.values())}",
            do="One of them is in another unit, or damaged.",
        )


def _warnings(values: dict[str, Array], loss: Array, table: "pandas.DataFrame", *, repetition: bool) -> list[str]:
    found = []
    low, high = USUAL_LOSS
    if (loss > high).any():
        found.append(f"over {high:g} nats/token in {rows(loss > high, table)}: is it perplexity, or in bits?")
    if (loss < low).any():
        found.append(f"under {low:g} nats/token in {rows(loss < low, table)}: is it in nats a token?")
    keys = np.stack([values["n"], values["d"], loss], axis=1)
    _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        repeated = np.ones(len(keys), bool)
        repeated[first] = False
        found.append(
            f"duplicate points (same n, d and loss): {rows(repeated, table)}; they count as often as they stand"
        )
    if "steps" in table:
        short = optional(table, "steps") < MIN_STEPS
        if short.any():
            found.append(f"under {MIN_STEPS:,} optimizer steps: {rows(short, table)}; such runs are mostly warm-up")
    if {"vocab_size", "d_model"} <= set(table.columns):
        heavy = optional(table, "vocab_size") * optional(table, "d_model") > 0.2 * values["n"]
        if heavy.any():
            found.append(
                f"the head (vocabulary x width) is over 20 % of n in {heavy.sum()} of {len(heavy)} rows: exponents "
                "depend on whether n counts it"
            )
    if "decayed" in table and (hot := optional(table, "decayed") < 1).any():
        found.append(f"learning rate not decayed: {rows(hot, table)}; such points are not end points of a law")
    if not repetition and {"tokens", "tokens_unique"} <= set(table.columns):
        again = int((optional(table, "tokens") > optional(table, "tokens_unique")).sum())
        if again:
            found.append(
                f"{again} row{'s pass' if again > 1 else ' passes'} over the training text more than once "
                "(tokens > tokens_unique): the law has no term for repetition"
            )
    ratio = values["c"] / (values["n"] * values["d"])
    if ratio.max() / ratio.min() > 1.1:
        found.append(
            f"c / (n d) runs from {ratio.min():.3g} to {ratio.max():.3g} over the rows: optima from the fitted "
            "surface use its geometric mean"
        )
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
