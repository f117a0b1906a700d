"""What `lm fit`, `lm predict` and `lm table` do with their arguments."""

import argparse
import dataclasses
import json
import shlex
import sys

from lm.base import files
from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.fit import fit_table
from lm.scaling.fitting.bootstrap import Interval, Resampling
from lm.scaling.join import join, join_curves
from lm.scaling.laws import law_named
from lm.scaling.pages.describe import describe, describe_prediction
from lm.scaling.planning.predict import predict as predict_loss
from lm.scaling.result import FitResult

OWN_ROLES = ("fit", "repeat")
OWN_UNIQUE = "tokens_unique"


def fit(args: argparse.Namespace) -> None:
    """`lm fit`: reads, fits, writes `--out`, prints the description."""
    if args.out is not None:
        files.refuse_target(args.out)
    table = read.read_table(args.table)
    columns, where = _own_columns(args, [str(name) for name in table.columns])
    result = fit_table(
        table,
        n=columns.n,
        d=columns.d,
        c=columns.c,
        loss=columns.loss,
        u=columns.u,
        where=where,
        law=args.law,
        objective=args.objective,
        pins=_pins(args.pin),
        bootstrap=args.bootstrap,
        seed=args.seed,
        cluster=args.cluster,
        resampling=None if args.resampling is None else Resampling(args.resampling),
        interval=Interval(args.interval),
        budgets=args.budget,
        others=_names(args.others),
        optimum_of=args.optimum_of,
        holdout=None if args.holdout is None else _names(args.holdout),
        compare=args.compare,
        counting=args.counting,
        command=shlex.join(["lm", *sys.argv[1:]]),
    )
    if args.out is not None:
        result.save(args.out)
    print(describe(result))
    if args.out is not None:
        print(f"written: {args.out}")


def predict(args: argparse.Namespace) -> None:
    """`lm predict`: the loss at --n and --d, as text or JSON."""
    found = predict_loss(FitResult.load(args.fit), args.n, args.d, args.u)
    print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False) if args.json else describe_prediction(found))


def table(args: argparse.Namespace) -> None:
    """`lm table`: joins run folders or their curves; names the folders that give no row on standard error."""
    rows, unfinished = (join_curves if args.curves else join)(args.folders, mixed=args.mixed)
    for folder in unfinished:
        print(f"unfinished{', or without metrics.jsonl' if args.curves else ''}: {folder}", file=sys.stderr)
    if args.out is None:
        print(rows.to_csv(index=False), end="")
        return
    files.write_text(args.out, rows.to_csv(index=False))
    print(f"{len(rows)} {'steps' if args.curves else 'runs'}: {args.out}")


def _own_columns(args: argparse.Namespace, names: list[str]) -> tuple[read.Columns, str | None]:
    """The mapping that was asked for; without one our own run table's, fitted cells only; the choice is printed."""
    own = read.Columns()
    loss = own.loss if args.loss is None else args.loss
    if any(flag is not None for flag in (args.n, args.d, args.c)):
        return read.Columns(args.n, args.d, args.c, loss, args.u), args.where
    repeats = any("u" in law_named(name).variables for name in (args.law, *_names(args.others)) if name)
    u = OWN_UNIQUE if args.u is None and repeats else args.u
    where = args.where
    if where is None and "role" in names:
        where = " or ".join(f"role == '{role}'" for role in OWN_ROLES)
    print(
        f"columns of our own run table: --n {own.n} --d {own.d} --c {own.c} --loss {loss}"
        + (f" --u {u}" if u else "")
        + (f' --where "{where}"' if where else "")
    )
    return read.Columns(own.n, own.d, own.c, loss, u), where


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _pins(texts: list[str]) -> dict[str, float]:
    pins = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in pins:
            raise UsageError(f"'{name}' is pinned twice", where="--pin", do="Give it once.")
        try:
            pins[name] = float(value)
        except ValueError:
            raise UsageError(f"'{text}' is not NAME=VALUE", where="--pin", do="For example --pin E=1.6.") from None
    return pins
