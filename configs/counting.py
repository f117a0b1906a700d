"""Counting models on bytes: `configs/counting.py:uniform`, `:unigram`, `:bigram`, `:ngram` (order 5, the default).

    lm train --config configs/counting.py:ngram --workdir runs/ngram --config.data.corpus=TEXT --config.model.order=7

They count the very tokens that a training run of the same data, batch size and steps is given, here those of
`configs/tiny.py`: an equal-data comparison. Smoothing is interpolated modified Kneser-Ney (`lm/model/counting.py`);
`--config.model.pseudocount=1` adds one to every count instead.
"""

from ml_collections import ConfigDict

ORDERS = {"uniform": 0, "unigram": 1, "bigram": 2, "ngram": 5}


def get_config(arg: str | None = None) -> ConfigDict:
    name = arg or "ngram"
    if name not in ORDERS:
        from lm.base.errors import UsageError

        known = ", ".join(ORDERS)
        raise UsageError(f"there is no counting model '{name}'", where="configs/counting.py", do=f"Known: {known}.")
    return ConfigDict(
        {
            "model": {"vocab_size": 257, "context_length": 128, "order": ORDERS[name]},  # bytes and the end of text
            "data": {"corpus": "stdlib", "tokenizer": "bytes"},
            "batch_size": 8,
            "steps": 2000,
        }
    )
