"""A byte-level model small enough for a laptop: minutes on two cores, on the standard library's own source.

lm train --config configs/tiny.py --workdir runs/tiny
"""

from ml_collections import ConfigDict


def get_config(arg: str | None = None) -> ConfigDict:
    del arg
    width = 64
    return ConfigDict(
        {
            "model": {
                "vocab_size": 257,  # bytes and the end of a document
                "context_length": 128,
                "n_layer": 2,
                "d_model": width,
                "n_head": 4,
                "d_ff": 4 * width,
                "feed_forward": "gelu",
            },
            "data": {"corpus": "stdlib", "tokenizer": "bytes"},
            "optimizer": {"peak_lr": 3e-3, "warmup_steps": 50},
            "batch_size": 8,
            "steps": 2000,
            "log_every": 50,
            "eval_every": 500,
            "checkpoint_every": 500,
        }
    )
