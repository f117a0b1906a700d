"""`lm bench data`: batches per second against Grain fed row by row, and against bare indexing of the mapped file."""

import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.progress import bar
from lm.bench.interleave import Run, interleave, timed
from lm.bench.machine import Meter
from lm.bench.peer import Peer
from lm.bench.rows import Row, Unit
from lm.data.batches import Batches
from lm.data.tokens import TokenFile

TOKENS = 1 << 24  # 32 MB of uint16: more than a cache holds, little enough to write


@dataclasses.dataclass(frozen=True)
class Draw:
    """Batches of one size, and how many make one sample."""

    length: int
    batch: int
    steps: int

    @property
    def name(self) -> str:
        """As in the tables of docs/benchmarks.md."""
        return f"T{self.length} B{self.batch}"


DRAWS = (Draw(64, 4, steps=1000), Draw(256, 16, steps=500))


def bench_data(
    rounds: int, meter: Meter, draws: Sequence[Draw] = DRAWS, tokens: int = TOKENS
) -> tuple[list[Row], dict[str, Any]]:
    """Measures random access and iteration at every size; returns the rows and what each peer said of itself."""
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = _random_file(Path(folder) / "tokens.bin", tokens)
        for draw in draws:
            found, facts[draw.name] = _measure(file, draw, rounds, meter)
            rows += found
    return rows, facts


def _measure(file: TokenFile, draw: Draw, rounds: int, meter: Meter) -> tuple[list[Row], dict[str, Any]]:
    batches = Batches(file, draw.length, draw.batch, seed=0)
    steps, rows = itertools.count(), batches.iterate()
    ours: dict[str, Run] = {
        "batches[step]": timed(lambda: batches[next(steps)], 20),
        "iterate": timed(lambda: next(rows), 20),
        "bare": timed(_bare_indexing(file, draw), 20),
    }
    spec = {"path": str(file.path), "length": draw.length, "batch": draw.batch}
    peers = [
        Peer("Grain, an element a row, default options", "grain_rows.py", sys.executable, {**spec, "threads": None}),
        Peer("Grain, an element a row, no threads", "grain_rows.py", sys.executable, {**spec, "threads": 0}),
    ]
    with bar(f"data {draw.name}", len(peers) + rounds) as progress:
        taken = interleave(ours, peers, rounds=rounds, steps=draw.steps, meter=meter, progress=progress)
    megatokens = draw.length * draw.batch / 1e6
    names = [peer.name for peer in peers]
    limit = statistics.median(taken.rates(megatokens, ["bare"])["bare"])
    return [
        Row(
            case=f"{draw.name} {how}",
            dtype="int32",
            unit=Unit.MEGATOKENS_PER_SECOND,
            ours=taken.rates(megatokens, [how])[how],
            peers=taken.rates(megatokens, names),
            missing=taken.missing_of(names),
            limit=limit,
            limit_is="NumPy gathering the same windows from the mapped file, order given, uint16 left as it is",
            note="peers give inputs and targets; ours give the weights too",
        )
        for how in ("batches[step]", "iterate")
    ], taken.facts


def _bare_indexing(file: TokenFile, draw: Draw) -> Callable[[], np.ndarray]:
    tokens = file.array()
    windows = (len(tokens) - 1) // draw.length
    windows_WT = np.lib.stride_tricks.sliding_window_view(tokens, draw.length + 1)[:: draw.length]
    order = itertools.cycle(np.random.default_rng(0).integers(windows, size=(1000, draw.batch)))
    return lambda: windows_WT[next(order)]


def _random_file(path: Path, tokens: int) -> TokenFile:
    np.random.default_rng(0).integers(256, size=tokens, dtype=np.uint16).tofile(path)
    return TokenFile(
        path=path, dtype=np.dtype(np.uint16), tokens=tokens, bytes=tokens, document_starts=np.zeros(1, np.int64),
        document_digests=("",), fingerprint="random", tokenizer="bytes", vocab_size=257, eos_id=256,
    )  # fmt: skip
