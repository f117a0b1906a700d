"""Log-probabilities of given tokens: the one scorer for training loss, evaluations and everything later.

A stream is a flat array of tokens whose first one is only context; every other one is predicted and scored exactly
once. It is read through windows of fixed length, each a run of `window` inputs and, one place further, `window`
targets. Where windows overlap, a target is scored by the first window that holds it (in the later one it is context).
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import RunError, UsageError

LogProbFn = Callable[[Any, np.ndarray, np.ndarray, np.ndarray | None], Any]
"""(params, inputs_BT, targets_BT, segments_BT or None) -> logp_BT, of the last places of a row where not of all"""

BEFORE = 0  # the document id of places before a stream; its documents count from 1


def token_log_probs(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """log softmax(logits)[target] in nats, float32 [B, T]; a shift of all logits of a position has no effect."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    shifted_BTV = logits_BTV - jax.lax.stop_gradient(jnp.max(logits_BTV, axis=-1, keepdims=True))
    # A masked sum and not a gather: its gradient is a fused select, and a sharded vocabulary stays where it is.
    is_target_BTV = jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, 2) == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target_BTV, shifted_BTV, 0.0), axis=-1)
    return target_BT - jnp.log(jnp.sum(jnp.exp(shifted_BTV), axis=-1))


def predicted(logits_BTV: jax.Array, x_BT: jax.Array) -> jax.Array:
    """What stands at the places of a row that have logits, which are its last (`Transformer`)."""
    return x_BT[:, x_BT.shape[1] - logits_BTV.shape[1] :]


class Bos(enum.StrEnum):
    """What the first token of a text is predicted from."""

    END_OF_TEXT = "the first token is predicted from an end-of-text token put in front"
    BEGIN = "documents are predicted from the token that begins each, which is not scored itself"
    NONE = "the first token is not scored: the tokenizer has no end-of-text token to put in front"


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Tokens to score, all but the first, with what their bytes and documents are.

    `document_starts` are ascending indices into `tokens`, the first one 0; `token_bytes_V` counts the bytes of
    text that each id stands for.
    """

    tokens: np.ndarray
    document_starts: np.ndarray
    token_bytes_V: np.ndarray
    bos: Bos


def stream_of(tokens: np.ndarray, document_starts: np.ndarray, token_bytes_V: np.ndarray, eos_id: int | None) -> Stream:
    """A stream that begins with the end-of-text token, put in front where it is not there already.

    Raises:
      UsageError: no token is left to score.
    """
    bos = Bos.NONE if eos_id is None else Bos.END_OF_TEXT
    starts = np.asarray(document_starts, np.int64)
    if eos_id is not None and (len(tokens) == 0 or tokens[0] != eos_id):
        tokens = np.concatenate([np.array([eos_id], tokens.dtype), tokens])
        starts = np.concatenate([np.zeros(1, np.int64), starts[1:] + 1])
    if len(tokens) < 2:
        raise UsageError("there is no token to score", do="Pass a longer text.")
    return Stream(tokens, starts, token_bytes_V, bos)


def sliding_windows(n_tokens: int, window: int, stride: int) -> np.ndarray:
    """Starts of the windows that score every token but the first; each but the first scores `stride` new ones.

    Raises:
      UsageError: a window below 1, or a stride outside [1, window].
    """
    if window < 1:
        raise UsageError(f"the window is {window} tokens", where="--window", do="It must be at least 1.")
    if not 1 <= stride <= window:
        raise UsageError(f"stride {stride} is not between 1 and the window {window}", where="--stride",
                         do="A longer one would leave tokens unscored.")  # fmt: skip
    return np.arange(0, max(1, n_tokens - 1 - (window - stride)), stride, dtype=np.int64)


def evaluation_windows(n_tokens: int, window: int, count: int) -> np.ndarray:
    """Starts of at most `count` whole windows, evenly spaced over the stream and not overlapping.

    A stream shorter than one window is one (partly empty) window.
    """
    whole = (n_tokens - 1) // window
    count = max(1, min(count, whole))
    places = np.arange(count, dtype=np.int64) * max(whole, 1) // count
    return places * window


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities in nats (float32) of the tokens at `indices` (ascending) of the stream.

    [N], or [N, K] of a `LogProbFn` that gives K numbers a target.
    """

    indices: np.ndarray
    log_probs: np.ndarray


def score_windows(
    log_prob_fn: LogProbFn,
    params: Any,
    stream: Stream,
    starts: np.ndarray,
    window: int,
    batch_size: int,
    segment_mask: bool = False,
    lead: int = 0,
) -> Scored:
    """Scores the tokens of the windows that begin at `starts` (ascending), each once, in one compiled shape.

    Args:
      log_prob_fn: called with int32 arrays [batch_size, lead + window] only; a last batch is filled up with copies,
        which are thrown away, as is whatever lies behind the end of the stream.
      segment_mask: hands document ids to `log_prob_fn`, so that attention stays inside documents; else None.
      lead: tokens before each window that the model reads and predicts nothing of: the source of an encoder but for
        its last. Where there are fewer, ids say so (`BEFORE`), with or without `segment_mask`.
    """
    starts_W = np.asarray(starts, np.int64)
    scored_before_W = np.concatenate([[0], np.maximum(starts_W[:-1] + window - starts_W[1:], 0)])
    last = len(stream.tokens) - 1
    offsets_1T = np.arange(-lead, window, dtype=np.int64)[None, :]
    indices, log_probs = [], []
    waiting: list[tuple[np.ndarray, np.ndarray, Any]] = []

    def collect() -> None:
        rows_B, target_BT, device_BT = waiting.pop(0)
        fresh_BT = (offsets_1T[:, lead:] >= scored_before_W[rows_B][:, None]) & (target_BT <= last)
        indices.append(target_BT[fresh_BT])
        log_probs.append(np.asarray(device_BT, np.float32)[: len(rows_B)][fresh_BT])

    for first in range(0, len(starts_W), batch_size):
        rows_B = np.arange(first, min(first + batch_size, len(starts_W)))
        filled_B = np.resize(rows_B, batch_size)
        place_BT = starts_W[filled_B][:, None] + offsets_1T
        segments_BT = None
        if segment_mask:
            segments_BT = np.searchsorted(stream.document_starts, np.minimum(place_BT, last), "right").astype(np.int32)
        elif lead:
            segments_BT = np.where(place_BT < 0, BEFORE, BEFORE + 1).astype(np.int32)
        inputs_BT, targets_BT = (stream.tokens[np.clip(place_BT + ahead, 0, last)].astype(np.int32) for ahead in (0, 1))
        beyond_BT = starts_W[rows_B][:, None] + offsets_1T[:, lead:] + 1
        waiting.append((rows_B, beyond_BT, log_prob_fn(params, inputs_BT, targets_BT, segments_BT)))
        if len(waiting) > 1:  # fetched one batch late, so that the device never waits for the host
            collect()
    while waiting:
        collect()
    return Scored(np.concatenate(indices), np.concatenate(log_probs))


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a stream was predicted, with all that the numbers depend on.

    `standard_error` is of nats_per_token, clustered by document (None for a single document); `bits_per_byte` is None
    where the scored tokens stand for no bytes. `tokens` counts the scored ones, ends of documents among them.
    """

    nats_per_token: float
    standard_error: float | None
    perplexity: float
    bits_per_token: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    documents: int
    window: int
    stride: int
    bos: Bos


def summarise(scored: Scored, stream: Stream, window: int, stride: int) -> Score:
    """The score of a stream from the log-probabilities of its tokens, summed in float64.

    Standard error: documents are the independent units, sqrt(G / (G - 1) sum_d (S_d - mean n_d)^2) / sum_d n_d over G
    documents with n_d tokens and loss S_d (the ratio estimator; Miller 2024, arXiv:2411.00640, section 2.2).

    Raises:
      RunError: a log-probability is not finite.
    """
    losses = -scored.log_probs.astype(np.float64)
    if not np.all(np.isfinite(losses)):
        bad = int(np.flatnonzero(~np.isfinite(losses))[0])
        raise RunError(f"the log-probability of token {scored.indices[bad]} is {scored.log_probs[bad]}",
                       do="Take an earlier checkpoint; of counts, set a pseudocount above 0 or none.")  # fmt: skip
    mean = float(np.mean(losses))
    # The input before a target says which document it is predicted in: an end-of-text target ends its own document.
    document = np.searchsorted(stream.document_starts, scored.indices - 1, side="right")
    _, document = np.unique(document, return_inverse=True)
    documents = int(document.max()) + 1
    residuals = np.bincount(document, weights=losses) - mean * np.bincount(document)
    error = None
    if documents > 1:
        error = math.sqrt(documents / (documents - 1) * float(np.sum(residuals**2))) / len(losses)
    size = int(np.sum(stream.token_bytes_V[stream.tokens[scored.indices]], dtype=np.int64))
    return Score(
        nats_per_token=mean,
        standard_error=error,
        perplexity=math.exp(mean),
        bits_per_token=mean / math.log(2),
        bits_per_byte=float(np.sum(losses)) / math.log(2) / size if size else None,
        tokens=len(losses),
        bytes=size,
        documents=documents,
        window=window,
        stride=stride,
        bos=stream.bos,
    )
