"""The `lm` command: one function a subcommand, each importing what it needs only when it runs."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm.base.errors import LmError, RunError, UsageError
from lm.base.freed import keep_freed_memory
from lm.base.signals import interruptible
from lm.parallel.libtpu import quiet_without_tpu

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lm.parallel.processes import Team
    from lm.sweep.launch import Launcher

Runner = Callable[[argparse.Namespace], None]

REPEATING = ("train", "eval", "bench")  # commands that run one program again and again
CONTINUED = ("train", "sweep")  # commands that keep what they did when they are interrupted


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns 0, 1 (the work failed), 2 (the request was wrong) or 130 (interrupted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv[0] if argv else ""
    overrides = [part.removeprefix("--config.") for part in argv if part.startswith("--config.")]
    quiet_without_tpu()
    if command in REPEATING:
        keep_freed_memory()
    try:
        args = _parser().parse_args([part for part in argv if not part.startswith("--config.")])
        args.overrides = overrides
        if overrides and not hasattr(args, "config"):
            raise UsageError("--config.leaf=value has nothing to override")
        from lm.base.progress import ConsoleHandler, spoken

        with interruptible(), spoken(ConsoleHandler()):
            args.run(args)
    except LmError as error:
        print(f"lm {command}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a file that cannot be opened, read or written
        told = RunError(error.strerror or str(error), where=str(error.filename or ""))
        print(f"lm {command}: {told}", file=sys.stderr)
        return told.exit_code
    except KeyboardInterrupt:
        left = "The same command continues where it stopped" if command in CONTINUED else "Nothing half-written is left"
        print(f"lm {command}: interrupted. {left}.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lm", description="From text to scaling laws.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (declare, example) in COMMANDS.items():
        summary = (declare.__doc__ or "").strip().splitlines()[0]
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
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


def _train(parser: argparse.ArgumentParser) -> Runner:
    """Trains one run in a folder, or continues what is there: the same command after an interruption."""
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="a file with get_config(arg), or a .json")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the run folder, or gs://bucket/run")
    parser.add_argument("--init-from", metavar="RUN", help="start from the parameters of another run folder")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where raw text is tokenised to (default DIR/data)")
    parser.add_argument("--profile", type=_steps, metavar="A:B", help="trace steps A to B into DIR/profile")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases too (extra 'wandb')")
    _several(parser)

    def run(args: argparse.Namespace) -> None:
        from lm.base.config import load_file, override
        from lm.train import counting
        from lm.train.config import build_run

        given = [f"init_from={args.init_from}"] if args.init_from else []
        config = override(build_run(load_file(args.config)), [*args.overrides, *given])
        with _team(args) as team:
            row = counting.run(
                config, args.workdir, cache=args.cache, profile=args.profile, wandb=args.wandb, team=team
            )
            if team.first:
                print(
                    f"loss {row['loss']:.4f} nats/token, {row['bits_per_byte']:.4f} bits/byte after "
                    f"{row['tokens']:,} tokens ({row['flops_matmul']:.3g} FLOP, {row['tokens_per_second']:,.0f} "
                    f"tokens/s): {args.workdir}"
                )

    return run


def _several(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("several processes", "found by itself under srun, mpirun and on TPU pods")
    flags.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    flags.add_argument("--processes", type=int, metavar="N", help="how many work as one")
    flags.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    flags.add_argument("--join-timeout", type=_positive, metavar="S", help="until all have come (default 300 s)")
    flags.add_argument("--peer-timeout", type=_positive, metavar="S", help="of silence before death (default 120 s)")


def _team(args: argparse.Namespace) -> "AbstractContextManager[Team]":
    from lm.parallel.launcher import find
    from lm.parallel.processes import JOIN_SECONDS, PEER_SECONDS, joined

    group = find(args.coordinator, args.processes, args.process)
    join, peer = args.join_timeout or JOIN_SECONDS, args.peer_timeout or PEER_SECONDS
    return joined(group, join_seconds=join, peer_seconds=peer)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, at least 1")
    return int(text)


def _sweep(parser: argparse.ArgumentParser) -> Runner:
    """Trains a ladder's grid of models, fits its law, predicts the held-out run and writes a report."""
    parser.add_argument("config", metavar="LADDER[:ARG]", help="a ladder file, e.g. configs/ladders/quick.py")
    parser.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="holds a folder for each sweep")
    parser.add_argument("--jobs", type=int, metavar="N", help="cells at once on this machine (default: one a core)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its cost, train nothing")
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local", help="where cells run")
    jobs = parser.add_argument_group("with --launcher slurm, an array of jobs, a cell each")
    jobs.add_argument("--partition", metavar="P", help="as sbatch takes it, like the next three")
    jobs.add_argument("--account", metavar="A")
    jobs.add_argument("--time", metavar="T", help="limit of a job: at it the cell saves, is queued again and continues")
    jobs.add_argument("--gpus-per-node", metavar="G", help="e.g. 4 or h100:4")
    jobs.add_argument("--nodes-per-cell", type=int, metavar="N", help="nodes of a job (default 1), a process on each")
    jobs.add_argument("--max-parallel", type=int, metavar="K", help="jobs at once (default: all)")
    jobs.add_argument("--slurm", metavar="KEY=VALUE", action="append", help="any other option of sbatch, e.g. qos=low")

    def run(args: argparse.Namespace) -> None:
        from lm.sweep.ladder import load_ladder
        from lm.sweep.sweep import sweep

        ladder = load_ladder(args.config, args.overrides)
        sweep(ladder, args.workdir, launcher=_launcher(args), dry_run=args.dry_run)

    return run


def _launcher(args: argparse.Namespace) -> "Launcher":
    flags = ("partition", "account", "time", "gpus_per_node", "nodes_per_cell", "max_parallel", "slurm")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    if args.launcher == "local":
        from lm.sweep.local import Local, slots

        if given:
            raise UsageError("says how Slurm runs cells", where=f"--{next(iter(given)).replace('_', '-')}",
                             do="Add --launcher slurm, or leave it out.")  # fmt: skip
        return Local(slots(args.jobs))
    from lm.sweep.slurm import Slurm

    if args.jobs is not None:
        raise UsageError("is for cells on this machine", where="--jobs", do="Say --max-parallel for Slurm.")
    return Slurm(options=tuple(given.pop("slurm", ())), **given)


def _status(parser: argparse.ArgumentParser) -> Runner:
    """Shows how far a sweep is: cells done, running with step and time left, queued, and failed with the reason."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a sweep's folder, e.g. runs/quick")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(args: argparse.Namespace) -> None:
        from lm.sweep.status import as_dict, show, status

        found = status(args.folder)
        if args.json:
            print(json.dumps(as_dict(found), indent=2))
        else:
            show(found)

    return run


def _cancel(parser: argparse.ArgumentParser) -> Runner:
    """Cancels a sweep's Slurm jobs and ends its `lm sweep` on this machine; checkpoints are kept."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a sweep's folder, e.g. runs/quick")

    def run(args: argparse.Namespace) -> None:
        from lm.sweep.status import cancel

        print("\n".join(cancel(args.folder)) or "nothing was going on")

    return run


def _steps(text: str) -> tuple[int, int]:
    """Reads A:B, 1 <= A <= B."""
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"'{text}' is not A:B with 1 <= A <= B, e.g. 10:15")
    return int(first), int(last)


def _report(parser: argparse.ArgumentParser) -> Runner:
    """Draw a finished sweep's figures and write its report.html, one file that opens without network."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a sweep's folder, with table.csv and fit.json")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="of the files in DIR/figures")

    def run(args: argparse.Namespace) -> None:
        from lm.scaling.pages.report import write_report
        from lm.scaling.pages.style import Format

        print(f"report: {write_report(args.folder, Format(args.format))}")

    return run


class _ListLaws(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from lm.scaling.laws import listing

        print(listing())
        parser.exit()


def _fit(parser: argparse.ArgumentParser) -> Runner:
    """Fits a law with intervals, a certificate and IsoFLOP optima to a run table or anybody's CSV, JSONL or Parquet."""
    parser.add_argument("table", metavar="FILE", help="CSV, TSV, JSONL or Parquet")
    for flag, meaning in (("n", "parameters"), ("d", "tokens"), ("c", "FLOP")):
        parser.add_argument(f"--{flag}", metavar="COL", help=f"column of {meaning}; two of n, d and c do (c = 6 n d)")
    parser.add_argument("--u", metavar="COL", help="column of distinct training tokens, for laws of repeated data")
    parser.add_argument("--loss", metavar="COL", help="column of loss, nats/token")
    parser.add_argument("--where", metavar="EXPR", help="rows to use, a pandas query")
    parser.add_argument("--laws", action=_ListLaws, nargs=0, help="list the laws with their formulas and exit")
    parser.add_argument("--law", help="law to fit (default hoffmann; of a setting's optima: by what varies)")
    parser.add_argument("--others", metavar="LAW,LAW", default="", help="laws to fit beside it")
    parser.add_argument(
        "--holdout",
        metavar="LAW,LAW",
        nargs="?",
        const="",
        help="score it beside other laws (default: a few forms) by "
        "fitting below cut-offs of compute and predicting above",
    )
    parser.add_argument(
        "--optimum-of",
        metavar="COL",
        help="fit where this setting (learning rate, batch size) has the least loss at each n and d: X* = K n^p d^q",
    )
    parser.add_argument(
        "--objective",
        default="huber_log",
        help="huber_log (delta 1e-3), huber_log:DELTA, log_least_squares, log_absolute, log_asymmetric (over 10), "
        "log_asymmetric:OVER; in nats: least_squares, asymmetric, asymmetric:OVER",
    )
    parser.add_argument("--pin", metavar="NAME=VALUE", action="append", default=[], help="hold a parameter fixed")
    parser.add_argument("--cluster", metavar="COL", help="resample whole clusters of rows; with --compare: the run")
    parser.add_argument("--compare", action="store_true", help="all approaches side by side, and how far they disagree")
    parser.add_argument("--resampling", choices=["point", "residual"], help="what is drawn (default point)")
    parser.add_argument("--interval", choices=["percentile", "bca"], default="percentile")
    parser.add_argument(
        "--bootstrap", metavar="K", type=int, default=1000, help="resamples (default 1000): 0 or at least 20"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0)
    parser.add_argument("--budget", metavar="FLOP", type=float, action="append", default=[], help="give optima for it")
    parser.add_argument("--counting", action="store_true", help="fit the same runs under every rule for N and C")
    parser.add_argument("--out", metavar="FILE", help="where fit.json goes")

    def run(args: argparse.Namespace) -> None:
        from lm.scaling import command

        command.fit(args)

    return run


def _predict(parser: argparse.ArgumentParser) -> Runner:
    """Predicts the loss of a run from a fit, with the interval of the mean and a prediction interval."""
    parser.add_argument("--fit", required=True, metavar="FILE", help="fit.json of `lm fit`")
    parser.add_argument("--n", required=True, type=float, help="parameters, as the fit counts them")
    parser.add_argument("--d", required=True, type=float, help="tokens")
    parser.add_argument("--u", type=float, help="distinct tokens among them, for laws of repeated data (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(args: argparse.Namespace) -> None:
        from lm.scaling import command

        command.predict(args)

    return run


def _plan(parser: argparse.ArgumentParser) -> Runner:
    """Plans the best model for a budget or a loss from a fit, and the runs to train next; writes them as a ladder."""
    parser.add_argument("--fit", required=True, metavar="FILE", help="fit.json of `lm fit`")
    parser.add_argument("--budget", metavar="FLOP", type=float, action="append", default=[], help="repeatable")
    parser.add_argument("--loss", type=float, help="instead of a budget: the cheapest model of this loss, nats/token")
    parser.add_argument("--inference-tokens", metavar="T", type=float, help="tokens to be served: 2 n T FLOP more")
    parser.add_argument("--unique-tokens", metavar="U", type=float, help="distinct training tokens that there are")
    parser.add_argument("--next", metavar="K", type=int, help="runs to propose for a narrower N* (default 3; 0: none)")
    parser.add_argument("--next-budget", metavar="FLOP", type=float, help="for all of them (default: largest fitted)")
    parser.add_argument("--ladder", metavar="FILE", type=Path, help="write them as a ladder for `lm sweep`")
    parser.add_argument("--base", metavar="LADDER[:ARG]", help="the ladder that it continues")
    parser.add_argument("--column", metavar="K", type=int, default=0, help="K sizes about N* at the budget in it too")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(args: argparse.Namespace) -> None:
        from lm.scaling.planning import command

        if (args.ladder is None) != (args.base is None) or (args.column and not args.ladder):
            raise UsageError("--ladder FILE, --base LADDER and --column K go together", where="--ladder")
        found = command.plan(args)
        added = 0
        if args.ladder is not None:
            from lm.sweep.propose import write_ladder

            added = write_ladder(found, args.ladder, args.base, column=args.column)
        command.show(found, args)
        if added:
            print(f"written: {args.ladder}, {added} cells after those of {args.base}", file=sys.stderr)

    return run


def _table(parser: argparse.ArgumentParser) -> Runner:
    """Joins the finished runs under sweep folders into one table."""
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--out", metavar="FILE", help="CSV to write (default: print it)")
    parser.add_argument("--curves", action="store_true", help="a row for each logged training step, not for each run")
    parser.add_argument("--mixed", action="store_true", help="join different corpora, tokenizers or evaluations")

    def run(args: argparse.Namespace) -> None:
        from lm.scaling import command

        command.table(args)

    return run


def _count(parser: argparse.ArgumentParser) -> Runner:
    """Counts parameters by group, FLOPs under every named convention and bytes of the decoding cache."""
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="a file with get_config(arg), or a .json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="also sum over the products of the traced training step")

    def run(args: argparse.Namespace) -> None:
        from lm.base.config import load_file, override
        from lm.model.config import ModelConfig
        from lm.model.count import as_text, costs, traced_flops_per_token
        from lm.train.config import build_run

        config = override(build_run(load_file(args.config)), args.overrides)
        counted = costs(config.model, config.steps * config.tokens_per_step)
        if args.check:
            if not isinstance(config.model, ModelConfig):
                raise UsageError("traces a training step, and this run only counts", where="--check",
                                 do="Leave it out.")  # fmt: skip
            counted["traced_flops_per_token"] = traced_flops_per_token(config.model)
        print(json.dumps(counted, indent=2) if args.json else as_text(counted))

    return run


def _compile(parser: argparse.ArgumentParser) -> Runner:
    """Compiles the train step for a slice of TPUs that is not here: memory, collectives, a roofline, the best mesh."""
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="a file with get_config(arg), or a .json")
    parser.add_argument("--topology", required=True, metavar="T", help="v5e:AxB, v6e:AxB or v5p:AxBxC, in chips")
    parser.add_argument("--slices", type=_positive, default=1, metavar="N", help="so many of them (default 1)")
    parser.add_argument(
        "--search", type=_positive, nargs="?", const=12, metavar="N",
        help="compile N meshes, remat policies and accumulations (default 12), rank them and pick",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it as JSON")

    def run(args: argparse.Namespace) -> None:
        from lm.train import compile_command

        compile_command.run(args)

    return run


def _eval(parser: argparse.ArgumentParser) -> Runner:
    """Scores texts (nats/token, bits/byte) or runs tasks of lm-evaluation-harness under a run's newest checkpoint."""
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", action="append", metavar="TEXT", help="text file, folder or quoted glob (repeatable)")
    what.add_argument("--harness", action="append", metavar="TASK",
                      help="task of lm-evaluation-harness: a name or a YAML file (repeatable)")  # fmt: skip
    parser.add_argument("--window", type=int, metavar="T", help="tokens of context (default: the model's)")
    parser.add_argument("--stride", type=int, metavar="S", help="tokens scored by each further window (default: T)")
    parser.add_argument("--separator", metavar="S", help="splits .txt files into documents, e.g. '\\n\\n'")
    parser.add_argument("--per-token", type=Path, metavar="FILE", help="write a JSON line for each scored token")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _several(parser)

    def run(args: argparse.Namespace) -> None:
        from lm.base.files import refuse_target
        from lm.run.restore import load
        from lm.train.evaluate import as_dict, as_text, evaluate, write_per_token

        if args.harness:
            _harness(args)
            return
        if args.per_token:
            refuse_target(args.per_token)
            if len(args.text) > 1:
                raise UsageError("is of one text", where="--per-token", do="Pass one --text.")
        with _team(args) as team:
            loaded = load(args.checkpoint, team)
            found = evaluate(loaded, args.text, window=args.window, stride=args.stride, separator=args.separator)
            if not team.first:
                return
            if args.per_token:
                write_per_token(found[args.text[0]], args.per_token)
            print(json.dumps(as_dict(found), indent=2) if args.json else as_text(found))

    return run


def _harness(args: argparse.Namespace) -> None:
    for flag in ("window", "stride", "separator", "per_token", "coordinator", "processes", "process"):
        if getattr(args, flag) is not None:
            raise UsageError("does not go with --harness", where=f"--{flag.replace('_', '-')}",
                             do="A task says how it is scored, in one process.")  # fmt: skip
    from lm.interop.harness import as_text, run_tasks
    from lm.run.restore import load_model

    found = run_tasks(load_model(args.checkpoint), args.harness)
    print(json.dumps(found, indent=2, default=str) if args.json else as_text(found))


def _generate(parser: argparse.ArgumentParser) -> Runner:
    """Answers prompts under a run's newest checkpoint: one streams to the terminal, many go to a file."""
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", action="append", help="a prompt (may be given again)")
    asked.add_argument("--prompts", metavar="FILE", type=Path, help='a prompt a line, or .jsonl with "prompt"')
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer (default 128, fewer where the context ends)"
    )
    parser.add_argument("--n", type=int, default=1, metavar="K", help="samples of each prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy (default 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest (default 0: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest of mass P (default 1)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="keep those P times as likely as the best"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="on logits of what was there"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="off logits of what was there")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time")
    parser.add_argument("--logit-bias", action="append", default=[], metavar="ID=B", help="-inf forbids a token")
    parser.add_argument(
        "--order", metavar="NAMES", help="default repetition,presence,bias,temperature,top-k,top-p,min-p"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends an answer before TEXT (\\n: newline)"
    )
    parser.add_argument("--end-id", type=int, action="append", default=[], metavar="ID", help="default: end of text")
    parser.add_argument("--ignore-end", action="store_true", help="no token ends an answer")
    held = parser.add_mutually_exclusive_group()
    held.add_argument("--regex", metavar="R", help="every answer matches R whole, even where it is cut off")
    held.add_argument("--schema", type=Path, metavar="FILE", help="every answer is JSON that this JSON schema allows")
    parser.add_argument("--beams", type=int, metavar="K", help="beam search with K beams instead of sampling")
    parser.add_argument("--length-alpha", type=float, metavar="A", help="log p / penalty(n): its exponent (default 0)")
    parser.add_argument(
        "--length-form", choices=("gnmt", "power"), help="penalty ((5+n)/6)^A (gnmt, the default) or n^A"
    )
    parser.add_argument("--best", type=int, metavar="N", help="answers of the beam search (default 1)")
    parser.add_argument("--draft", type=Path, metavar="RUN", help="a smaller model that drafts: sooner, same law")
    parser.add_argument("--draft-tokens", type=int, metavar="K", help="drafted for each pass of the model (default 4)")
    parser.add_argument("--best-of", type=int, metavar="N", help="the best of N samples by mean log-probability")
    parser.add_argument(
        "--full",
        choices=("error", "shorter", "stop"),
        help="where prompt and answer pass the context: refuse (default with --max-tokens), cut the answer off "
        "(default without), or take prompts with no room left too",
    )
    parser.add_argument("--cache", choices=("model", "int8"), default="model", help="type of keys and values")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="answers at once (default 16)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines: the settings, then a sample each")
    parser.add_argument("--json", action="store_true", help="print JSON lines")

    def run(args: argparse.Namespace) -> None:
        from lm.decode import command

        command.generate(args)

    return run


def _compress(parser: argparse.ArgumentParser) -> Runner:
    """Compresses a file with a run's newest checkpoint and an arithmetic coder, without loss."""
    parser.add_argument("file", type=Path, metavar="FILE", help="any file")
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, metavar="F", help="file to write (default FILE.lmz)")
    parser.add_argument("--blocks", type=int, metavar="B", help="coded side by side (default: by length, 64 at most)")
    parser.add_argument("--overlap", type=int, metavar="T", help="tokens read again where the context is full (half)")
    parser.add_argument("--compare", action="store_true", help="a table with gzip, bzip2, xz and zstd at their best")
    parser.add_argument("--json", action="store_true", help="print JSON")

    def run(args: argparse.Namespace) -> None:
        from lm.decode import compress_command

        compress_command.compress(args)

    return run


def _decompress(parser: argparse.ArgumentParser) -> Runner:
    """Decompresses a file of `lm compress` with the same checkpoint on the same kind of machine."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that `lm compress` wrote")
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run folder")
    parser.add_argument("--out", type=Path, metavar="F", help="file to write (default: FILE without .lmz)")
    parser.add_argument("--force", action="store_true", help="try although model, tokenizer or machine differ")

    def run(args: argparse.Namespace) -> None:
        from lm.decode import compress_command

        compress_command.decompress(args)

    return run


def _import(parser: argparse.ArgumentParser) -> Runner:
    """Makes a run folder of a Hugging Face folder: config.json, safetensors and tokenizer.json, without PyTorch."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a model that was fetched before")
    parser.add_argument("--out", required=True, type=Path, metavar="RUN", help="run folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products (default: as config.json says)")
    parser.add_argument("--tokenizer", metavar="SPEC", help="'bytes' or a tokenizer.json (default: the folder's own)")

    def run(args: argparse.Namespace) -> None:
        from lm.interop.importing import import_model
        from lm.model.config import Dtype

        dtype = None if args.dtype is None else Dtype(args.dtype)
        found = import_model(args.folder, args.out, dtype=dtype, tokenizer=args.tokenizer)
        print(f"{found.model_type}, {found.parameters:,} parameters, products in {found.model.dtype.value}: {args.out}")

    return run


def _export(parser: argparse.ArgumentParser) -> Runner:
    """Writes a run's newest checkpoint as a Hugging Face folder that transformers loads."""
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, trained or imported")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the tensors")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="G", help="largest file, 1e9 bytes (default 5)")

    def run(args: argparse.Namespace) -> None:
        from lm.interop.exporting import export_model
        from lm.model.config import Dtype

        if not args.shard_gb > 0:
            raise UsageError(f"is {args.shard_gb}; it must be above 0", where="--shard-gb")
        layout, files = export_model(
            args.run_folder, args.out, dtype=Dtype(args.dtype), shard_bytes=round(args.shard_gb * 1e9)
        )
        print(f"{layout.architecture}, {args.dtype}, {len(files)} file(s) of tensors: {args.out}")

    return run


def _bench(parser: argparse.ArgumentParser) -> Runner:
    """Measures ours, peers and limits in turn in one run, and says how far apart they are."""
    parser.add_argument("what", choices=("train", "data", "fit", "decode"),
                        help="training steps, batches, fitting a law, or greedy answers")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine's facts")
    parser.add_argument("--peer-python", metavar="P", help="interpreter with PyTorch (default: .venv* here, then this)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="samples of each (default 5)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the cases whose name holds it")

    def run(args: argparse.Namespace) -> None:
        from lm.bench.command import What, bench

        bench(What(args.what), args.json, args.peer_python, args.rounds, args.only)

    return run


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], Runner], str]] = {
    "tokenize": (_tokenize, "lm tokenize 'books/*.jsonl.xz' --out tokens --train-bpe 4096"),
    "train": (_train, "lm train --config configs/tiny.py --workdir runs/tiny --config.optimizer.peak_lr=3e-3"),
    "sweep": (_sweep, "lm sweep configs/ladders/quick.py --workdir runs --dry-run"),
    "status": (_status, "lm status runs/quick"),
    "cancel": (_cancel, "lm cancel runs/quick"),
    "table": (_table, "lm table runs/quick --out table.csv"),
    "fit": (_fit, "lm fit runs.csv --n params --d tokens --loss loss --out fit.json"),
    "predict": (_predict, "lm predict --fit fit.json --n 1e9 --d 2e10"),
    "plan": (_plan, "lm plan --fit fit.json --budget 1e24 --inference-tokens 2e12"),
    "report": (_report, "lm report runs/quick --format svg"),
    "count": (_count, "lm count --config configs/llama.py:8b --json"),
    "compile": (_compile, "lm compile --config configs/llama.py:8b --topology v5e:16x16 --search"),
    "eval": (_eval, "lm eval --checkpoint runs/tiny --text book.txt --stride 64 --per-token tokens.jsonl"),
    "generate": (_generate, "lm generate --checkpoint runs/tiny --prompt 'Once upon' --temperature 0.8 --top-p 0.95"),
    "compress": (_compress, "lm compress book.txt --checkpoint runs/tiny --compare"),
    "decompress": (_decompress, "lm decompress book.txt.lmz --checkpoint runs/tiny --out book.again.txt"),
    "import": (_import, "lm import downloads/gpt2 --out runs/gpt2"),
    "export": (_export, "lm export runs/gpt2 --out gpt2-again"),
    "bench": (_bench, "lm bench train --json train.json"),
}


if __name__ == "__main__":
    sys.exit(main())
