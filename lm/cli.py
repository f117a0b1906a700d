"""The `lm` command: one function a subcommand, each importing what it needs only when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence

from lm.base.errors import LmError, UsageError

Runner = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns 0, 1 (the work failed), 2 (the request was wrong) or 130 (interrupted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    overrides = [part.removeprefix("--config.") for part in argv if part.startswith("--config.")]
    args = _parser().parse_args([part for part in argv if not part.startswith("--config.")])
    args.overrides = overrides
    try:
        if overrides and not hasattr(args, "config"):
            raise UsageError("--config.leaf=value has nothing to override", where=f"lm {args.command}")
        args.run(args)
    except LmError as error:
        print(f"lm {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"lm {args.command}: interrupted. The same command continues where it stopped.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lm", description="From text to scaling laws.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (declare, example) in COMMANDS.items():
        summary = (declare.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(
            name, help=summary, description=summary, epilog=f"example:\n  {example}", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=declare(sub))
    return parser


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], Runner], str]] = {}


if __name__ == "__main__":
    sys.exit(main())
