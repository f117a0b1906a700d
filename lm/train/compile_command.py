"""`lm compile`: one step compiled for a described slice, or a search for the best way to lay it out."""

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from lm.base.config import build, load_file, override, to_dict
from lm.base.errors import RunError, UsageError
from lm.base.files import atomic, refuse_target
from lm.base.progress import console
from lm.base.signals import answering
from lm.run.record import environment
from lm.train.ahead import as_dict, as_text, compile_step, flags, versions
from lm.train.config import RunConfig
from lm.train.search import Candidate, Tried, layouts, pick, table, trials


def run(args: argparse.Namespace) -> None:
    """Carries out the command.

    Raises:
      UsageError: no such slice, no libtpu, a mesh that does not divide, or an encoder.
      RunError: the step does not fit (told after all that is known of it), or nothing that was searched does.
      KeyboardInterrupt: a search was stopped by SIGINT or SIGTERM; what it had found is told.
    """
    if args.json:
        refuse_target(args.json)
    config = override(build(RunConfig, load_file(args.config)), args.overrides)
    if config.model.encoder is not None:
        what = "encoder is given, and the products and traffic of a step are known of decoders by themselves"
        raise UsageError(what, where="config.model", do="Leave it out: lm count counts its FLOPs.")
    if args.search:
        _search(config, args)
        return
    with answering(signal.SIGINT, signal.SIG_DFL):  # the compiler looks at no signal for minutes: Ctrl-C ends it
        found = compile_step(config, args.topology, args.slices)
    _write(args.json, as_dict(found))
    print(as_text(found))
    if not found.fits:
        raise RunError("the step does not fit", where=args.topology, do="Look for a layout that does: --search.")


def _search(config: RunConfig, args: argparse.Namespace) -> None:
    possible, hopeless = layouts(config, args.topology, args.slices)
    asked = {
        "config": to_dict(config),
        "topology": args.topology,
        "slices": args.slices,
        "versions": versions(),
        "commit": environment()["commit"],
    }
    tried: list[Tried] = []
    try:
        for one in trials(possible, args.topology, args.slices, args.search, _kept(args.json, asked)):
            tried.append(one)
            _write(args.json, asked | {"layouts": _rows(tried, hopeless)})
    except KeyboardInterrupt:
        if args.json and tried:
            console.print(f"{args.json} keeps what was compiled: the same command goes on from there")
        raise
    finally:
        print(f"{len(tried)} layouts of {config.batch_size} rows compiled for {args.topology}, least time first")
        print(table(tried, hopeless))
    print(f"pick: lm train --config {args.config} {flags(pick(tried, args.topology).config)}")


def _rows(tried: list[Tried], hopeless: list[Candidate]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"flags": flags(one.config), "fits": one.fits, "message": one.message, "found": one.found} for one in tried
    ]
    return rows + [{"flags": flags(one.config), "fits": False, "least_bytes": one.least_bytes} for one in hopeless]


def _kept(path: Path | None, asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What an earlier search for the same wrote there, by flags; a layout that failed is tried again."""
    try:
        told = json.loads(path.read_text()) if path else {}
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(told, dict) or any(told.get(name) != value for name, value in asked.items()):
        return {}
    return {row["flags"]: row["found"] for row in told["layouts"] if row.get("found")}


def _write(path: Path | None, told: Any) -> None:
    if path:
        with atomic(path) as file:
            json.dump(told, file, indent=2)
