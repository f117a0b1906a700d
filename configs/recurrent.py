"""LSTM and GRU baselines for a laptop, byte by byte, with the parameters of configs/tiny.py to 2 %.

    lm train --config configs/recurrent.py:lstm --workdir runs/lstm
    lm train --config configs/recurrent.py:gru --workdir runs/gru

Two layers, each a state of the model's width and nothing else, added to the residual stream.
"""

from ml_collections import ConfigDict

WIDTHS = {"lstm": 76, "gru": 88}


def get_config(arg: str | None = None) -> ConfigDict:
    if arg not in WIDTHS:
        from lm.base.config import nearest
        from lm.base.errors import UsageError

        raise UsageError(f"there is no variant '{arg}'", where="configs/recurrent.py", do=nearest(str(arg), WIDTHS))
    return ConfigDict(
        {
            "model": {
                "vocab_size": 257,  # bytes and the end of a document
                "context_length": 128,
                "n_layer": 2,
                "d_model": WIDTHS[arg],
                "n_head": 1,
                "d_ff": 0,
                "mixer": arg,
                "feed_forward": "none",
                "positions": "none",
                "bias": True,
                "init_std": None,
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
