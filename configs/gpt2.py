"""GPT-2 small: 124,439,808 parameters (123,532,032 without positions, biases and norm scales).

    lm train --config configs/gpt2.py --workdir runs/gpt2 --config.data.tokenizer=FILE --config.data.corpus=TEXT

Shape: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and the released code.
Its vocabulary is that of GPT-2's tokenizer.json, which is not part of this repository: name your copy. The paper gives
no optimizer; AdamW's settings are those of Brown et al. 2020 (arXiv:2005.14165, table 2.1 and appendix B) for the model
of this size: rate 6e-4, betas 0.9 and 0.95, weight decay 0.1, clipping at 1, half a million tokens a step, warm-up over
375 million tokens, cosine down to a tenth.
"""

from ml_collections import ConfigDict


def get_config(arg: str | None = None) -> ConfigDict:
    if arg is not None:
        from lm.base.errors import UsageError

        raise UsageError(f"there is no variant '{arg}'", where="configs/gpt2.py", do="It takes no argument.")
    return ConfigDict(
        {
            "model": {
                "vocab_size": 50257,
                "context_length": 1024,
                "n_layer": 12,
                "d_model": 768,
                "n_head": 12,
                "d_ff": 3072,
                "norm": "layernorm",
                "norm_eps": 1e-5,
                "feed_forward": "gelu",
                "positions": "learned",
                "bias": True,
                "tied_embedding": True,
                "dtype": "bfloat16",
                "remat": "dots",
            },
            "data": {"corpus": "stdlib", "tokenizer": "gpt2/tokenizer.json"},
            "optimizer": {
                "peak_lr": 6e-4,
                "warmup_steps": 715,
                "schedule": "cosine",
                "final_lr_fraction": 0.1,
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "batch_size": 512,
            "steps": 19_073,  # 10 billion tokens
            "eval_every": 1000,
            "eval_tokens": 1_048_576,
            "checkpoint_every": 1000,
        }
    )
