"""Evaluation during training: a fixed, evenly spaced part of each validation set, scored by the one scorer."""

from typing import Any

import jax
import jax.numpy as jnp

from lm.data.corpus import Corpus
from lm.data.tokens import TokenFile
from lm.model.score import (
    LogProbFn,
    Score,
    Stream,
    evaluation_windows,
    score_windows,
    stream_of,
    summarise,
    token_log_probs,
)
from lm.model.transformer import Transformer
from lm.train.config import RunConfig

BATCH_TOKENS = 4096  # scored at once


class Validation:
    """Scores every validation set of a run: `validation` (held out of the corpus) and each extra one by its name."""

    def __init__(self, config: RunConfig, corpus: Corpus):
        self._config = config
        window = config.model.context_length
        self._rows = max(1, BATCH_TOKENS // window)
        self._log_probs = log_prob_fn(config)
        files = {"validation": corpus.validation, **corpus.extra}
        token_bytes_V = corpus.tokenizer.token_bytes
        self._sets = {name: self._windows(file, stream_from(file, token_bytes_V)) for name, file in files.items()}

    def __call__(self, params: Any) -> dict[str, Score]:
        """The score of each set under `params`; windows do not overlap."""
        window, mask = self._config.model.context_length, self._config.data.segment_mask
        scores = {}
        for name, (stream, starts) in self._sets.items():
            scored = score_windows(self._log_probs, params, stream, starts, window, self._rows, mask)
            scores[name] = summarise(scored, stream, window, window)
        return scores

    def _windows(self, file: TokenFile, stream: Stream) -> tuple[Stream, Any]:
        window = self._config.model.context_length
        return stream, evaluation_windows(file.tokens, window, max(1, self._config.eval_tokens // window))


def stream_from(file: TokenFile, token_bytes_V: Any) -> Stream:
    """A token file as the scorer reads it."""
    return stream_of(file.array(), file.document_starts, token_bytes_V, file.eos_id)


def log_prob_fn(config: RunConfig) -> LogProbFn:
    """The compiled `(params, inputs_BT, targets_BT, segments_BT) -> logp_BT` of a run's model."""
    model = Transformer(config.model)

    @jax.jit
    def log_probs(params, inputs_BT, targets_BT, segments_BT):
        logits_BTV = jnp.asarray(model.apply({"params": params}, inputs_BT, segments_BT))
        return token_log_probs(logits_BTV, targets_BT)

    return log_probs
