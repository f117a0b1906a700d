"""`lm compile`: one step compiled for a described slice, or a search for the best way to lay it out."""

import argparse
import json
from typing import Any

from lm.base.config import build, load_file, override
from lm.base.errors import RunError
from lm.base.files import atomic, refuse_target
from lm.train.ahead import as_dict, as_text, compile_step, flags
from lm.train.config import RunConfig
from lm.train.search import pick, search, table


def run(args: argparse.Namespace) -> None:
    """Carries out the command.

    Raises:
      UsageError: no such slice, no libtpu, a mesh that does not divide.
      RunError: the step does not fit (told after all that is known of it), or nothing that was searched does.
    """
    if args.json:
        refuse_target(args.json)
    config = override(build(RunConfig, load_file(args.config)), args.overrides)
    if args.search:
        _search(config, args)
        return
    found = compile_step(config, args.topology, args.slices)
    _write(args, as_dict(found))
    print(as_text(found))
    if not found.fits:
        raise RunError("the step does not fit", where=args.topology, do="Look for a layout that does: --search.")


def _search(config: RunConfig, args: argparse.Namespace) -> None:
    tried, hopeless = search(config, args.topology, args.slices, args.search)
    rows: list[dict[str, Any]] = [
        {"flags": flags(one.config), "fits": one.fits, "message": one.message, "found": one.found} for one in tried
    ]
    rows += [{"flags": flags(one.config), "fits": False, "least_bytes": one.least_bytes} for one in hopeless]
    _write(args, {"topology": args.topology, "slices": args.slices, "layouts": rows})
    print(f"{len(tried)} layouts of {config.batch_size} rows compiled for {args.topology}, least time first")
    print(table(tried, hopeless))
    print(f"pick: lm train --config {args.config} {flags(pick(tried, args.topology).config)}")


def _write(args: argparse.Namespace, told: Any) -> None:
    if args.json:
        with atomic(args.json) as file:
            json.dump(told, file, indent=2)
