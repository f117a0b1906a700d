"""The `lm` command: one function a subcommand, each importing what it needs only when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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


def _tokenize(parser: argparse.ArgumentParser) -> Runner:
    """Turn text into a folder of token files, split by document into training and validation."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, folder, quoted glob, or 'stdlib'")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--tokenizer", default="bytes", metavar="SPEC", help="'bytes' or a tokenizer.json")
    parser.add_argument("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens instead")
    parser.add_argument("--validation-fraction", type=float, default=0.05, metavar="F", help="share of the documents")
    parser.add_argument("--separator", metavar="S", help="splits .txt files into documents, e.g. '\\n\\n'")

    def run(args: argparse.Namespace) -> None:
        from lm.data.corpus import describe, tokenize

        if args.train_bpe is not None and args.tokenizer != "bytes":
            raise UsageError("--train-bpe makes a tokenizer and --tokenizer names one", do="Pass one of the two.")
        tokenize(args.inputs, args.out, tokenizer=args.tokenizer, bpe_vocabulary=args.train_bpe,
                 validation_fraction=args.validation_fraction, separator=args.separator)  # fmt: skip
        print(describe(args.out))

    return run


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], Runner], str]] = {}
COMMANDS["tokenize"] = (_tokenize, "lm tokenize 'books/*.jsonl.xz' --out tokens --train-bpe 4096")


if __name__ == "__main__":
    sys.exit(main())
