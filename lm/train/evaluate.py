"""`lm eval`: a trained run's log-probabilities of any text, every token scored once."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lm.base.errors import UsageError
from lm.base.files import atomic
from lm.data.sources import read_documents
from lm.data.tokenizer import Tokenizer
from lm.model.config import ModelConfig, Positions
from lm.model.score import Bos, LogProbFn, Score, Scored, Stream, score_windows, sliding_windows, stream_of, summarise
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.run.restore import LoadedCounts, LoadedModel
from lm.train.validation import log_prob_fn, rows_at_once


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """The score of a text under a run, and what it was made of."""

    score: Score
    scored: Scored
    stream: Stream
    step: int


def evaluate(
    run: LoadedModel | LoadedCounts,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    separator: str | None = None,
) -> dict[str, Evaluation]:
    """Scores text files, folders or globs, each on its own, all of which are read first.

    Args:
      window: tokens of context at most; None: the model's context length. The whole text where that is shorter. An
        encoder's source is in it: what is scored is the rest, and the source alone overlaps.
      stride: tokens scored by each further window; None: all that it can, so that those do not overlap.
      separator: splits .txt files into documents.

    Raises:
      UsageError: no such text, an empty one, or a window or stride that does not fit the model.
      RunError: a log-probability that is not finite.
    """
    model = run.model
    window = model.context_length if window is None else window
    if 0 < window <= model.lead:
        what = f"{window} is shorter than the encoder's source_length of {model.lead + 1}"
        raise UsageError(what, where="--window", do="What comes after the source is scored.")
    stride = window - model.lead if stride is None else stride
    learned = isinstance(model, ModelConfig) and model.positions is Positions.LEARNED
    if learned and window > model.context_length:
        raise UsageError(f"{window} is longer than the model's {model.context_length} learned positions",
                         where="--window")  # fmt: skip
    streams = {text: _read(text, separator, run.tokenizer) for text in texts}
    mesh = make_mesh(MeshConfig())  # this machine's devices, whatever the run had
    log_probs = log_prob_fn(model, mesh)
    return {text: _evaluated(run, stream, window, stride, mesh, log_probs) for text, stream in streams.items()}


def _evaluated(
    run: LoadedModel | LoadedCounts, stream: Stream, window: int, stride: int, mesh: Mesh, log_probs: LogProbFn
) -> Evaluation:
    lead = run.model.lead
    starts = sliding_windows(len(stream.tokens), window - lead, stride)
    # A longer one would be computed, and held in memory, for nothing.
    window = min(window, lead + len(stream.tokens) - 1)
    stride = min(stride, window - lead)
    rows = min(rows_at_once(window, mesh), -(-len(starts) // mesh.size) * mesh.size)
    mask = run.data.segment_mask
    scored = score_windows(log_probs, run.params, stream, starts, window - lead, rows, mask, lead)
    if stream.bos is Bos.BEGIN:
        kept = stream.tokens[scored.indices] != run.tokenizer.bos_id
        scored = Scored(scored.indices[kept], scored.log_probs[kept])
    return Evaluation(summarise(scored, stream, window, stride), scored, stream, run.step)


def as_dict(evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The score of a single text as JSON with the step of the checkpoint, or those of several by text."""
    told = {
        text: {**dataclasses.asdict(found.score), "bos": found.score.bos.value, "step": found.step}
        for text, found in evaluations.items()
    }
    return told if len(told) > 1 else next(iter(told.values()))


def as_text(evaluations: Mapping[str, Evaluation]) -> str:
    """The score of a single text as lines for people, or those of several as a table."""
    return _table(evaluations) if len(evaluations) > 1 else _lines(next(iter(evaluations.values())))


def _table(evaluations: Mapping[str, Evaluation]) -> str:
    name = max(len(text) for text in evaluations)
    head = f"{'text':{name}}  nats/token       ±  bits/byte       tokens        bytes  documents"
    lines, made = [head], set()
    for text, found in evaluations.items():
        score = found.score
        error, per_byte = ("-" if x is None else f"{x:.4f}" for x in (score.standard_error, score.bits_per_byte))
        lines.append(
            f"{text:{name}} {score.nats_per_token:11.4f} {error:>7} {per_byte:>10} {score.tokens:12,} "
            f"{score.bytes:12,} {score.documents:10,}"
        )
        made.add(f"window {score.window} tokens, stride {score.stride}; BOS: {score.bos.value}")
    return "\n".join([*lines, *sorted(made), f"checkpoint of step {found.step:,}"])


def _lines(evaluation: Evaluation) -> str:
    score = evaluation.score
    clustered = f"± {score.standard_error:.4f}, clustered by document" if score.standard_error is not None else None
    per_byte = "undefined: no bytes" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return "\n".join(
        [
            f"nats/token   {score.nats_per_token:.4f} ({clustered or 'one document: no standard error'})",
            f"perplexity   {score.perplexity:.4f} a token",
            f"bits/token   {score.bits_per_token:.4f}",
            f"bits/byte    {per_byte}",
            f"scored       {score.tokens:,} tokens once each, {score.bytes:,} bytes, {score.documents:,} documents; "
            "the end of each document is a token",
            f"window       {score.window} tokens, stride {score.stride}",
            f"BOS          {score.bos.value}",
            f"checkpoint   step {evaluation.step:,}",
        ]
    )


def write_per_token(evaluation: Evaluation, path: Path | str) -> None:
    """Writes a JSON line for each scored token, in the order of the text: index, id and log-probability in nats."""
    scored = evaluation.scored
    with atomic(path) as file:
        for index, log_prob in zip(scored.indices.tolist(), scored.log_probs.tolist(), strict=True):
            row = {"index": index, "token": int(evaluation.stream.tokens[index]), "log_prob": log_prob}
            file.write(json.dumps(row) + "\n")


def _read(text: str, separator: str | None, tokenizer: Tokenizer) -> Stream:
    """The stream in the layout that training uses: an end-of-text token before each document and after the last.

    Where another token begins documents, each has that one in front and the end-of-text token behind it.
    """
    begin, end = np.array([tokenizer.bos_id], np.int32), np.array([tokenizer.eos_id], np.int32)
    one = tokenizer.bos_id == tokenizer.eos_id
    texts = tokenizer.encode_batch(list(read_documents(text, separator)))
    documents = [np.concatenate([begin, ids, end[:0] if one else end]) for ids in texts]
    if not documents:
        raise UsageError("there is no text in it", where=text)
    lengths = [len(document) for document in documents]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    tokens = np.concatenate([*documents, end if one else end[:0]])
    stream = stream_of(tokens, starts, tokenizer.token_bytes, tokenizer.bos_id)
    return stream if one else dataclasses.replace(stream, bos=Bos.BEGIN)
