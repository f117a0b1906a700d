"""Evaluation during training: a fixed, evenly spaced part of each validation set, scored by the one scorer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lm.data.config import VALIDATION
from lm.data.corpus import Corpus
from lm.data.tokens import TokenFile
from lm.model.config import ModelConfig
from lm.model.counting import Counting, Counts
from lm.model.fused import choose
from lm.model.score import (
    LogProbFn,
    Score,
    Stream,
    evaluation_windows,
    predicted,
    score_windows,
    stream_of,
    summarise,
    token_log_probs,
)
from lm.model.transformer import Transformer
from lm.parallel.rules import Rules, flax_rules, put_whole, replicated, sharded
from lm.train.config import AnyRun, RunConfig

BATCH_TOKENS = 4096  # scored at once


class Validation:
    """Scores every evaluation set of a run by its name, and a mixture's under `VALIDATION` as well: `mixed` of them."""

    def __init__(self, config: AnyRun, corpus: Corpus, mesh: Mesh):
        self._config = config
        self._rows = rows_at_once(config.model.context_length, mesh)
        rules = config.mesh.rules if isinstance(config, RunConfig) else ()
        self._log_probs = log_prob_fn(config.model, mesh, rules)
        token_bytes_V = corpus.tokenizer.token_bytes
        self._sets = {
            name: self._windows(file, stream_from(file, token_bytes_V)) for name, file in corpus.held_out.items()
        }
        self._shares = {part.name: float(part.share) for part in corpus.parts}

    def __call__(self, params: Any, before_batch: Callable[[], None] = lambda: None) -> dict[str, Score]:
        """The score of each set under `params`, the same in every process; windows do not overlap.

        Args:
          before_batch: called before each batch; what it raises ends the evaluation.
        """

        def log_probs(*batch: Any) -> Any:
            before_batch()
            return self._log_probs(*batch)

        model, mask = self._config.model, self._config.data.segment_mask
        scores, stride = {}, model.predicted_length
        for name, (stream, starts) in self._sets.items():
            scored = score_windows(log_probs, params, stream, starts, stride, self._rows, mask, model.lead)
            scores[name] = summarise(scored, stream, model.context_length, stride)
        if VALIDATION in scores:
            return scores
        return {VALIDATION: mixed([(share, scores[name]) for name, share in self._shares.items()]), **scores}

    def _windows(self, file: TokenFile, stream: Stream) -> tuple[Stream, Any]:
        window = self._config.model.predicted_length
        return stream, evaluation_windows(file.tokens, window, max(1, self._config.eval_tokens // window))


def mixed(parts: Sequence[tuple[float, Score]]) -> Score:
    """The score of a token drawn from a mixture, of (share of the tokens, score) of its parts, windows as theirs.

    Means of nats and of bytes are weighted by the shares; the standard error is that of independent parts.
    """
    nats = sum(share * score.nats_per_token for share, score in parts)
    errors = [share * error for share, score in parts if (error := score.standard_error) is not None]
    bytes_per_token = sum(share * score.bytes / score.tokens for share, score in parts)
    return dataclasses.replace(
        parts[0][1],
        nats_per_token=nats,
        standard_error=math.hypot(*errors) if len(errors) == len(parts) else None,
        perplexity=math.exp(nats),
        bits_per_token=nats / math.log(2),
        bits_per_byte=nats / math.log(2) / bytes_per_token if bytes_per_token else None,
        **{name: sum(getattr(score, name) for _, score in parts) for name in ("tokens", "bytes", "documents")},
    )


def stream_from(file: TokenFile, token_bytes_V: Any) -> Stream:
    """A token file as the scorer reads it."""
    return stream_of(file.array(), file.document_starts, token_bytes_V, file.eos_id)


def rows_at_once(window: int, mesh: Mesh) -> int:
    """Rows of `window` tokens scored at once: a multiple of the devices, so that each has as many.

    What the last batch lacks is filled up and weighs nothing (`score_windows`), and every process scores as many
    batches as the others.
    """
    return -(-max(1, BATCH_TOKENS // window) // mesh.size) * mesh.size


def log_prob_fn(
    config: ModelConfig | Counting,
    mesh: Mesh,
    rules: Rules = (),
    read: Callable[[jax.Array, jax.Array], jax.Array] = token_log_probs,
) -> LogProbFn:
    """The compiled `(params, inputs_BT, targets_BT, segments_BT) -> logp_BT` of a model.

    Every process gives the same arrays, which are spread over the mesh, and gets all log-probabilities back. Counts are
    looked up by each process itself.

    Args:
      read: what is read off logits_BTV for targets_BT: [B, T], or [B, T, K] for K numbers a target. Not of counts.
    """
    if isinstance(config, Counting):
        return Counts.log_probs

    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def log_probs(params, batch):
        attention = choose(config, batch["inputs"].shape[1], mesh, flax_rules(rules))
        model = Transformer(config, attention=attention)
        with sharded(mesh, rules):
            logits_BTV = jnp.asarray(model.apply({"params": params}, batch["inputs"], batch["segments"]))
        return read(logits_BTV, predicted(logits_BTV, batch["targets"]))

    def spread(params, inputs_BT, targets_BT, segments_BT):
        batch = {"inputs": inputs_BT, "targets": targets_BT, "segments": segments_BT}
        return log_probs(params, put_whole(batch, mesh, rules))

    return spread
