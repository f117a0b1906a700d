"""Llama 3 shapes: `configs/llama.py:1b`, `:8b` (the default) and `:70b`.

    lm train --config configs/llama.py:1b --workdir runs/llama --config.data.tokenizer=FILE --config.data.corpus=TEXT

8b and 70b: Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, which also gives peak
rate, 8,000 steps of warm-up, cosine decay over 1,200,000 steps and (section 3.4.1) batches from 4 million tokens of
8,192 on; they are 8,030,261,248 and 70,553,706,496 parameters. The rate falls to 1/100 of its peak there.
1b: the published shape of Llama 3.2 1B, tied, 1,235,814,400 parameters, with the 8b's settings. Betas, weight decay
and clipping are those of Touvron et al. 2023 (arXiv:2307.09288, section 2.2): 0.9, 0.95, eps 1e-5, 0.1 and 1.
Frequencies are not rescaled for long contexts as 3.1 and later do: this is the 8,192-token stage of pre-training.
"""

from ml_collections import ConfigDict

SHAPES = {
    "1b": {"n_layer": 16, "d_model": 2048, "n_head": 32, "d_ff": 8192, "tied_embedding": True},
    "8b": {"n_layer": 32, "d_model": 4096, "n_head": 32, "d_ff": 14336, "tied_embedding": False},
    "70b": {"n_layer": 80, "d_model": 8192, "n_head": 64, "d_ff": 28672, "tied_embedding": False},
}
PEAK_LR = {"1b": 3e-4, "8b": 3e-4, "70b": 1.5e-4}


def get_config(arg: str | None = None) -> ConfigDict:
    size = arg or "8b"
    if size not in SHAPES:
        from lm.base.errors import UsageError

        raise UsageError(f"there is no size '{size}'", where="configs/llama.py", do=f"Known: {', '.join(SHAPES)}.")
    return ConfigDict(
        {
            "model": {
                **SHAPES[size],
                "vocab_size": 128_256,
                "context_length": 8192,
                "n_kv_head": 8,
                "norm": "rmsnorm",
                "norm_eps": 1e-5,
                "feed_forward": "swiglu",
                "positions": "rope",
                "rope_base": 500_000.0,
                "dtype": "bfloat16",
                "remat": "full",
            },
            "data": {"corpus": "stdlib", "tokenizer": "llama3/tokenizer.json", "segment_mask": True},
            "mesh": {"data": 1, "fsdp": -1},
            "optimizer": {
                "peak_lr": PEAK_LR[size],
                "warmup_steps": 8000,
                "schedule": "cosine",
                "final_lr_fraction": 0.01,
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-5,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "batch_size": 512,
            "steps": 1_200_000,
            "log_every": 10,
            "eval_every": 5000,
            "eval_tokens": 4_194_304,
            "checkpoint_every": 1000,
        }
    )
