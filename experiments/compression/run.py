"""Measures compressing and decompressing a file beside sampling with as many rows, in turn, in one process."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.files import write_json
from lm.decode.compress import MOST_BLOCKS, Compressor
from lm.decode.generate import Decoder, Request
from lm.decode.settings import Settings
from lm.run.record import environment
from lm.run.restore import load_model


def main() -> None:
    """Prints medians and writes every round to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.compression", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="RUN")
    parser.add_argument("--file", type=Path, required=True, help="what is compressed")
    parser.add_argument("--bytes", type=int, default=65536, help="of its beginning (default 65,536)")
    parser.add_argument("--rows", type=int, default=MOST_BLOCKS, help="blocks, and answers at once (default 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON of every round")
    args = parser.parse_args()
    ways = three_ways(args.checkpoint, args.file.read_bytes()[: args.bytes], args.rows)
    for once in ways.values():  # compiles
        once()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, once in ways.items():
            clock, cpu = time.perf_counter(), time.process_time()
            tokens = once()
            found[name].append((tokens / (time.perf_counter() - clock), tokens / (time.process_time() - cpu)))
    sampled = np.array(found["sampling"])
    print(f"{'':14}{'tokens/s':>10}{'of sampling':>13}{'tokens/CPU-s':>14}{'of sampling':>13}")
    for name, rates in found.items():
        (clock, cpu), (of_clock, of_cpu) = np.median(rates, axis=0), np.median(np.array(rates) / sampled, axis=0)
        print(f"{name:14}{clock:10,.0f}{of_clock:13.2f}{cpu:14,.0f}{of_cpu:13.2f}")
    if args.out:
        write_json(args.out, {"rows": args.rows, "rates": found, "environment": environment()})


def three_ways(run: Path, data: bytes, rows: int) -> dict[str, Callable[[], int]]:
    """Sampling to the end of the context, compressing `data`, decompressing it; each gives how many tokens it did."""
    loaded = load_model(run)
    compressor = Compressor(loaded.model, loaded.params, loaded.tokenizer)
    decoder = Decoder(loaded.model, loaded.params, loaded.tokenizer)
    room = loaded.model.context_length
    asked = Request(max_tokens=room, steps=Settings().steps(loaded.model.vocab_size), end_ids=())
    packed, report = compressor.compress(data, blocks=rows)
    assert compressor.decompress(packed) == data

    def sampling() -> int:
        session = decoder.start(decoder.encode([""] * rows), asked)
        return sum(len(answer.tokens) for answer in decoder.completions(decoder.advance(session, room)))

    def once(work: Callable[[], Any]) -> Callable[[], int]:
        def done() -> int:
            work()
            return report.tokens

        return done

    return {
        "sampling": sampling,
        "compressing": once(lambda: compressor.compress(data, blocks=rows)),
        "decompressing": once(lambda: compressor.decompress(packed)),
    }
