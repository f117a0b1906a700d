"""The default ladder: a law from models of 7 to 190 thousand parameters, in minutes on two cores without accelerator.

Bytes of the standard library's source, two layers, windows of 64, 256 tokens a step. Four IsoFLOP budgets of five
sizes each, about a factor 1.6 apart and centred on the sizes that pilot runs found best; a run of 2.5 times the largest
budget is held out. The learning rate is tuned first, at the lowest budget.

    lm sweep configs/ladders/quick.py --workdir runs

The argument is a folder written by `lm tokenize`: one's own text, under its tokenizer.

    lm tokenize 'books/*.txt' --out tokens/books
    lm sweep configs/ladders/quick.py:tokens/books --workdir runs
"""

from pathlib import Path

from ml_collections import ConfigDict

from lm.base.config import to_dict
from lm.data.config import DataConfig
from lm.data.corpus import settings_of
from lm.sweep.ladder import chain, isoflop, sizes

LAYERS = 2
BUDGETS = {  # training FLOP, every product counted (flops_matmul) -> total parameters aimed at
    0.8e11: (7e3, 10e3, 15e3, 26e3, 41e3),
    1.6e11: (10e3, 15e3, 26e3, 41e3, 68e3),
    3.2e11: (15e3, 26e3, 41e3, 68e3, 115e3),
    6.4e11: (26e3, 41e3, 68e3, 115e3, 191e3),
}
HELD_OUT = 1.6e12, 115e3
REPEATED = 1.6e11, 41e3
TUNED = (15e3, 26e3, 41e3)


def shapes(parameters: tuple[float, ...], vocab_size: int) -> list[dict]:
    """Two-headed shapes nearest to total parameter counts, N = V D + 12 L D^2, in widths that are multiples of 4."""

    def width(n: float) -> int:
        quadratic = 12 * LAYERS
        root = ((vocab_size**2 + 4 * quadratic * n) ** 0.5 - vocab_size) / (2 * quadratic)
        return max(4, 4 * round(root / 4))

    return sizes([width(n) for n in parameters], depth=LAYERS, n_head=2, ff_ratio=4)


def get_config(arg: str | None = None) -> ConfigDict:
    data, vocab_size = settings_of(arg) if arg else (DataConfig(), 257)

    def at(budget: float, *parameters: float, **cell) -> list[dict]:
        return isoflop(shapes(parameters, vocab_size), [budget], **cell)

    fitted = [at(budget, *parameters) for budget, parameters in BUDGETS.items()]
    # The same run with other seeds: how far one run lies from another of the same size and length.
    repeats = [
        {**cell, "role": "repeat", "overrides": {**cell["overrides"], "seed": seed, "data.seed": seed}}
        for cell in at(*REPEATED)
        for seed in (1, 2)
    ]
    return ConfigDict(
        {
            "name": f"quick-{Path(arg).name}" if arg else "quick",
            "base": {
                "model": {
                    "vocab_size": vocab_size,
                    "context_length": 64,
                    "n_layer": LAYERS,
                    "d_model": 32,
                    "n_head": 2,
                    "d_ff": 128,
                    "feed_forward": "gelu",
                    "qk_norm": True,
                    "init_std": None,  # by width: 0.02 is far too small for these, and leaves attention asleep
                    "unroll_layers": True,  # a quarter faster than the scan at two layers
                },
                "data": to_dict(data),
                "optimizer": {"peak_lr": 1e-2, "warmup_steps": 50, "b2": 0.99},
                "batch_size": 4,
                "steps": 1000,
                "log_every": 100,
                "checkpoint_every": 4000,
                "checkpoints_kept": 1,
                "eval_tokens": 65_536,
            },
            "tune": {"cells": at(min(BUDGETS), *TUNED), "rates": [3.5e-3, 7e-3, 1.4e-2]},
            "cells": chain(*fitted, repeats, at(*HELD_OUT, role="holdout")),
            "fit": {"n": "params_total", "d": "tokens", "c": "flops_matmul", "loss": "loss", "bootstrap": 1000},
        }
    )
