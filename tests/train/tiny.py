"""The smallest whole runs: a corpus of seeded words and a one-layer model."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lm.train.loop as loop
from lm.base.config import build, override
from lm.parallel import rules
from lm.train.config import RunConfig

BASE: dict[str, Any] = {
    "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 16, "n_head": 2, "d_ff": 16},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
    "data": {"corpus": "?", "separator": "\n\n", "validation_fraction": 0.2},
    "steps": 12,
    "batch_size": 4,
    "log_every": 3,
    "eval_tokens": 64,
    "checkpoint_every": 5,
}


def corpus(folder: Path, *, documents: int = 12, words: int = 12, seed: int = 0) -> str:
    """Writes a text of short documents of seeded words, and names it."""
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(20)]
    texts = [" ".join(draw.choices(vocabulary, k=words)) for _ in range(documents)]
    path = folder / f"text{seed}.txt"
    path.write_text("\n\n".join(texts))
    return str(path)


def run_config(text: str, *overrides: str) -> RunConfig:
    """The tiny run on `text`, with `leaf=value` overrides."""
    return override(build(RunConfig, BASE), [f"data.corpus={text}", *overrides])


def config_file(folder: Path, text: str, **changes: Any) -> Path:
    """The tiny run as a .json for `lm train --config`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**BASE, **changes, "data": {**BASE["data"], "corpus": text}}))
    return path


def train_with(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, config: RunConfig, run: Path) -> Any:
    """Trains with `lm.train.loop.<name>` replaced, this once."""
    with monkeypatch.context() as patch:
        patch.setattr(loop, name, value)
        return loop.train(config, run)


def before_step(call: int, act: Callable[[], None]) -> Callable[..., Any]:
    """A `put_batch` that does `act` before the `call`-th step that it serves."""
    calls = itertools.count(1)

    def put_batch(*args: Any) -> Any:
        if next(calls) == call:
            act()
        return rules.put_batch(*args)

    return put_batch


def rows(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in read if kind in (None, row["kind"])]
