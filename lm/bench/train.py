"""`lm bench train`: tokens/s of our training step against nanoGPT's and nanodo's, and against the matmul rate.

Everyone starts from our parameters and trains on one batch of random tokens. A peer is only accepted when its first
loss and gradient norm are ours: then it computes the same function, neither more nor less.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm.base.progress import bar
from lm.bench import limits
from lm.bench.interleave import Run, Taken, interleave
from lm.bench.machine import Meter
from lm.bench.peer import Peer, find_python, save_start
from lm.bench.rows import Row, Unit
from lm.model.accounting import Flops, flops_per_token
from lm.model.config import Dtype, FeedForward, ModelConfig, Norm, Positions
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import put_batch
from lm.train.config import OptimizerConfig, RunConfig
from lm.train.step import fresh_state, make_train_step

LEARNING_RATE = 1e-3
# In float32 the same function differs by rounding; bfloat16 has 8 bits, and the loss averages thousands of tokens.
AGREEMENT = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The GPT-2-like model and batch of one case, and how many steps make one sample."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    steps: int

    @property
    def name(self) -> str:
        """As in the tables of docs/benchmarks.md."""
        return f"L{self.layers} D{self.width} H{self.heads} T{self.length} B{self.batch} V{self.vocabulary}"

    @property
    def tokens(self) -> int:
        """Predicted in a step."""
        return self.batch * self.length

    def run_config(self, dtype: Dtype) -> RunConfig:
        """Our whole run: GELU, learned positions, LayerNorm, no biases, tied; AdamW clipped at 1."""
        model = ModelConfig(
            vocab_size=self.vocabulary, context_length=self.length, n_layer=self.layers, d_model=self.width,
            n_head=self.heads, d_ff=4 * self.width, norm=Norm.LAYERNORM, feed_forward=FeedForward.GELU,
            positions=Positions.LEARNED, dtype=dtype,
        )  # fmt: skip
        optimizer = OptimizerConfig(peak_lr=LEARNING_RATE, warmup_steps=0, clip_norm=1.0)
        return RunConfig(model, optimizer, steps=1, batch_size=self.batch, mesh=MeshConfig())


SHAPES = (Shape(4, 128, 4, 256, 16, 256, steps=2), Shape(6, 384, 6, 256, 8, 256, steps=1))


def bench_train(
    peer_python: str | None, rounds: int, meter: Meter, shapes: Sequence[Shape] = SHAPES
) -> tuple[list[Row], dict[str, Any]]:
    """Measures every shape in float32 and bfloat16; returns the rows and what each peer said of itself.

    Raises:
      UsageError: `peer_python` is not a program.
    """
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    torch_python = find_python(peer_python, "torch")
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            case = _measure(shape, torch_python, rounds, meter, Path(folder) / "start.npz")
        rows += case.rows()
        facts[shape.name] = {"ours": case.first, **case.taken.facts}
    return rows, facts


@dataclasses.dataclass(frozen=True)
class _Case:
    """All that was measured at one shape."""

    shape: Shape
    peers: Sequence[Peer]
    taken: Taken
    first: Mapping[str, Mapping[str, float]]  # by dtype

    def rows(self) -> list[Row]:
        """float32 against float32 peers; bfloat16 against all, since the fastest of all is what it has to beat."""
        return [self._row(dtype) for dtype in Dtype]

    def _row(self, dtype: Dtype) -> Row:
        names = [peer.name for peer in self.peers if dtype is Dtype.BFLOAT16 or peer.spec["dtype"] == dtype]
        model = self.shape.run_config(dtype).model
        rates = {kind: limits.matmul_rate(self.taken, kind) for kind in (Dtype.FLOAT32, dtype)}
        fastest = max(rates, key=rates.__getitem__)
        per_token = flops_per_token(model, Flops.MATMUL)
        ours = self.taken.rates(self.shape.tokens, [_ours(dtype)])[_ours(dtype)]
        reached = statistics.median(ours) * per_token
        return Row(
            case=self.shape.name,
            dtype=dtype.value,
            unit=Unit.TOKENS_PER_SECOND,
            ours=ours,
            peers=self.taken.rates(self.shape.tokens, names),
            missing=self.taken.missing_of(names),
            limit=rates[fastest] / per_token,
            limit_is=f"{rates[fastest] / 1e9:.0f} GFLOP/s in {fastest.value} products of side {limits.MATMUL_SIDES}, "
            f"best side of each round, median over rounds; {per_token:,} FLOP a token ({Flops.MATMUL.value})",
            note=f"{reached / 1e9:.1f} GFLOP/s ({Flops.MATMUL.value})",
        )


def _measure(shape: Shape, torch_python: tuple[str | None, str], rounds: int, meter: Meter, arrays: Path) -> _Case:
    random = np.random.default_rng(0)
    tokens_BW = random.integers(shape.vocabulary, size=(shape.batch, shape.length + 1), dtype=np.int32)
    ours: dict[str, Run] = {}
    first: dict[str, dict[str, float]] = {}
    for dtype in Dtype:
        config = shape.run_config(dtype)
        if not ours:
            params = fresh_state(config, make_mesh(config.mesh))["params"]
            save_start(arrays, params, inputs=tokens_BW[:, :-1], targets=tokens_BW[:, 1:])
        ours[_ours(dtype)], first[dtype.value] = our_step(config, tokens_BW)
    for dtype in Dtype:
        ours |= limits.products(dtype)
    peers = peers_of(shape, torch_python, arrays)

    def accept(peer: Peer, facts: Mapping[str, Any]) -> str:
        dtype = Dtype(peer.spec["dtype"])
        return disagreement(facts, first[dtype.value], AGREEMENT[dtype])

    with bar(shape.name, len(peers) + rounds) as progress:
        taken = interleave(ours, peers, rounds=rounds, steps=shape.steps, meter=meter, progress=progress, accept=accept)
    return _Case(shape, peers, taken, first)


def disagreement(facts: Mapping[str, Any], expected: Mapping[str, float], tolerance: float) -> str:
    """Why a peer's first loss and gradient norm are not ours, relatively within `tolerance`; empty where they are."""
    for name in ("loss", "grad_norm"):
        # Written so that NaN disagrees.
        if not abs(facts[name] - expected[name]) <= tolerance * abs(expected[name]):
            return f"it computes something else: its first {name} is {facts[name]:.6g}, ours {expected[name]:.6g}"
    return ""


def peers_of(shape: Shape, torch_python: tuple[str | None, str], arrays: Path) -> list[Peer]:
    """nanoGPT's way (eager and compiled) in the interpreter with PyTorch, nanodo's in ours, each in both types."""
    config = shape.run_config(Dtype.FLOAT32)
    model, optimizer = config.model, config.optimizer
    sizes = ("vocab_size", "context_length", "n_layer", "d_model", "n_head", "d_ff")
    common = {
        "arrays": str(arrays),
        "sizes": {name: getattr(model, name) for name in sizes},
        "optimizer": {
            "lr": LEARNING_RATE,
            **{name: getattr(optimizer, name) for name in ("b1", "b2", "eps", "weight_decay", "clip_norm")},
        },
        "threads": limits.threads(),
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
    }
    python, reason = torch_python
    found = []
    for dtype in Dtype:
        for compiled in (False, True):
            name = f"nanoGPT {'compiled' if compiled else 'eager'} {dtype.value}"
            spec = {**common, "dtype": dtype.value, "compile": compiled}
            found.append(Peer(name, "nanogpt.py", python, spec, reason))
        spec = {**common, "dtype": dtype.value}
        found.append(Peer(f"nanodo {dtype.value}", "nanodo.py", sys.executable, spec))
    return found


def our_step(config: RunConfig, tokens_BW: np.ndarray) -> tuple[Run, dict[str, float]]:
    """Our compiled step on one batch as a function of the number of steps, and the first step's metrics."""
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh), fresh_state(config, mesh)
    weights_BT = np.ones((config.batch_size, config.model.context_length), np.float32)
    batch = put_batch({"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}, mesh)
    rate = np.float32(LEARNING_RATE)
    begun = time.perf_counter()
    state, metrics = step(state, batch, rate)
    first = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    first["first_step_seconds"] = time.perf_counter() - begun

    def run(count: int) -> float:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(count):
            state, metrics = step(state, batch, rate)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - begun

    run(2)
    return run, first


def _ours(dtype: Dtype) -> str:
    return f"ours {dtype.value}"
