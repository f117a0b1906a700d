"""`configs/tiny.py` with an encoder: half of each window is read by it, the other half is predicted from that.

    lm train --config configs/encoder_decoder.py --workdir runs/encoder_decoder

Of a window of 128 tokens the first 64 bear no loss but for the last of them, with which the decoder begins: 65 do, and
129 are processed. Two layers each, as T5 counts them (Raffel et al. 2020, arXiv:1910.10683, section 3.2.2): twice the
parameters of two layers, and about their FLOPs a processed token.
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
                "encoder": {"n_layer": 2, "source_length": 64},
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
