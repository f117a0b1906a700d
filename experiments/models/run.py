"""Every kind of model on the same text: those that learn by gradients on equal FLOPs, those that count on equal data.

What lies in the folder of runs is not trained again.
"""

import argparse
import datetime
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.base.files import write_json
from lm.model.accounting import Flops, flops_per_token
from lm.model.count import costs
from lm.run.record import environment
from lm.train.config import AnyRun, RunConfig, build_run
from lm.train.counting import run as train

HERE = Path(__file__).parent
CONTEXT, BATCH, VOCABULARY = 128, 16, 257  # bytes and the end of a document
RATES = (3e-3, 1e-2)  # peak learning rates: the better of the first seed is every seed's
DATA_OF = "GPT-2 style"  # whose tokens the counting models count

WIDE = {"n_layer": 2, "d_model": 64, "n_head": 4, "d_ff": 256}
GPT2 = {"norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "bias": True}
LLAMA = {"norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rope"}
STATES = {"mixer": "lstm", "feed_forward": "none", "positions": "none", "bias": True}

COUNTING = {"uniform": 0, "unigram": 1, "bigram": 2, "5-gram, Kneser-Ney": 5}
NEURAL: dict[str, dict[str, Any]] = {
    "LSTM, 2 layers": {"n_layer": 2, "d_model": 76, "n_head": 1, "d_ff": 0, **STATES},
    "attention, 1 layer": {**WIDE, **GPT2, "n_layer": 1, "d_model": 88, "d_ff": 352},
    "GPT-2 style": {**WIDE, **GPT2},
    "Llama style": {**WIDE, **LLAMA, "d_ff": 172},
    "mixture of 8 experts, 2 chosen": {**WIDE, **LLAMA, "d_ff": 86, "experts": {"count": 8, "chosen": 2}},
    "encoder-decoder": {**WIDE, **GPT2, "positions": "rope", "encoder": {"n_layer": 2, "source_length": CONTEXT // 2}},
}


def main() -> None:
    """Writes the table, the figure and every number of it."""
    parser = argparse.ArgumentParser(prog="python -m experiments.models", description=__doc__)
    parser.add_argument("--text", default="stdlib", help="text to train on, as config.data.corpus (default stdlib)")
    parser.add_argument("--workdir", type=Path, default=Path("runs/models"), metavar="DIR", help="holds the runs")
    parser.add_argument("--flops", type=float, default=1e12, help="of each training, flops_matmul (default 1e12)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a minute: 2e9 FLOP, one seed, nothing written here")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results (default: beside)")
    args = parser.parse_args()
    flops, seeds, rates = (2e9, 1, RATES[:1]) if args.quick else (args.flops, args.seeds, RATES)
    rows = list(table(args.text, args.workdir, flops, seeds, rates))
    print(as_markdown(rows))
    if not args.quick:
        about = {"date": str(datetime.date.today()), "text": Path(args.text).name, "flops": flops, **environment()}
        write_json(args.out / "results.json", {"about": about, "rows": rows})
        draw(rows, args.out / "bits_per_byte.png")


def table(text: str, workdir: Path, flops: float, seeds: int, rates: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A row a model, in the order of their history: its size, what it costs, and bits/byte of each seed."""
    steps = steps_of(NEURAL[DATA_OF], flops)
    for name, order in COUNTING.items():
        model = {"order": order}
        yield _row(name, [_run(text, workdir, name, model, steps, seed) for seed in range(seeds)], None)
    for name, model in NEURAL.items():
        steps = steps_of(model, flops)
        tried = {rate: _run(text, workdir, name, model, steps, 0, rate) for rate in rates}
        rate = min(tried, key=lambda rate: tried[rate][1]["bits_per_byte"])
        more = [_run(text, workdir, name, model, steps, seed, rate) for seed in range(1, seeds)]
        yield _row(name, [tried[rate], *more], rate)


def steps_of(model: dict[str, Any], flops: float) -> int:
    """Steps that take so many FLOP."""
    config = _config("stdlib", model, 1, 0, RATES[0])
    assert isinstance(config, RunConfig)
    return max(1, round(flops / (config.tokens_per_step * flops_per_token(config.model, Flops.MATMUL))))


def _config(text: str, model: dict[str, Any], steps: int, seed: int, rate: float | None) -> AnyRun:
    shape = {"vocab_size": VOCABULARY, "context_length": CONTEXT, **model}
    values: dict[str, Any] = {
        "model": shape,
        "data": {"corpus": text, "seed": seed},
        "batch_size": BATCH,
        "steps": steps,
        "eval_tokens": 2**18,
    }
    if rate is not None:
        shape["init_std"] = None  # by width: 0.02 is far too small for these
        values |= {"optimizer": {"peak_lr": rate, "warmup_steps": 50}, "seed": seed, "checkpoint_every": steps}
    return build_run(values)


def _run(
    text: str, workdir: Path, name: str, model: dict[str, Any], steps: int, seed: int, rate: float | None = None
) -> tuple[AnyRun, dict[str, Any]]:
    config = _config(text, model, steps, seed, rate)
    folder = "-".join([name.replace(" ", "_").replace(",", ""), *([] if rate is None else [f"{rate:g}"]), str(seed)])
    return config, train(config, workdir / folder, cache=workdir / "data")


def _row(name: str, runs: list[tuple[AnyRun, dict[str, Any]]], rate: float | None) -> dict[str, Any]:
    config, result = runs[0]
    cache = next(iter(costs(config.model, result["tokens"])["cache_bytes"].values()))
    return {
        "model": name,
        "params_total": result["params_total"],
        "params_active": result["params_active"],
        "tokens": result["tokens"],
        "flops_per_token": result[Flops.MATMUL.value] / result["tokens"],
        "cache_per_token": cache["per_token"],
        "cache_at_context": cache["at_context"],
        "peak_lr": rate,
        "bits_per_byte": [result["bits_per_byte"] for _, result in runs],
    }


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The table; FLOPs are `flops_matmul` of training a token, the cache is that of float32."""
    lines = [
        "| model | parameters, active | FLOPs a token | tokens | cache, bytes a token, at context | rate "
        "| bits/byte: mean, least - greatest | step |",
        "|---" * 8 + "|",
    ]
    before = None
    for row in rows:
        scores = row["bits_per_byte"]
        mean = statistics.mean(scores)
        active = "" if row["params_active"] == row["params_total"] else f", {row['params_active']:,}"
        step = "" if before is None else f"{mean - before:+.4f}"
        lines.append(
            f"| {row['model']} | {row['params_total']:,}{active} | {row['flops_per_token']:,.0f} | {row['tokens']:,} "
            f"| {row['cache_per_token']:,}, {row['cache_at_context']:,} | {row['peak_lr'] or ''} "
            f"| {mean:.4f}, {min(scores):.4f} - {max(scores):.4f} | {step} |"
        )
        before = mean
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bits/byte of every model, the first at the top; a bar from the least to the greatest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        scores = row["bits_per_byte"]
        axes.plot([min(scores), max(scores)], [place, place], color="#0072b2", linewidth=5, alpha=0.4)
        axes.plot(statistics.mean(scores), place, "o", color="#0072b2")
        axes.annotate(f"{statistics.mean(scores):.3f}", (max(scores), place), (8, -3), textcoords="offset points")
    axes.set_yticks(range(len(rows)), [row["model"] for row in reversed(rows)])
    axes.set_xlabel("bits/byte of held-out text")
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Software": None}, dpi=120)
