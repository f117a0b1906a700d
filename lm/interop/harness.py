"""lm-evaluation-harness on a run: the requests of its tasks, answered by our scorer and our decoder.

A context begins with the token that begins documents, as prompts of `lm generate` and texts of `lm eval` do. What does
not fit the model's context loses its beginning: of a context and its continuation the last context_length + 1 tokens
are read, of a prompt as many as leave room for the answer. Rolling log-likelihoods read windows of the whole context
that do not overlap, but for the last, which ends where the text does.
"""

import contextlib
import functools
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import RunError, UsageError, type_and_line
from lm.decode.ask import generate, load_decoder
from lm.decode.generate import Decoder
from lm.decode.slots import bucket
from lm.model.score import Bos, Stream, score_windows, token_log_probs
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.run.record import finite
from lm.run.restore import LoadedModel
from lm.train.validation import log_prob_fn, rows_at_once

os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap forks, which a process with XLA's threads must not
try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ModuleNotFoundError as missing:
    raise UsageError(f"needs the package {str(missing.name).partition('.')[0]}, which is not installed",
                     where="--harness", do="In the checkout: pip install -e '.[harness]'.") from None  # fmt: skip

BOOTSTRAP = 1000  # resamples for the standard error of a metric that is no mean
FEW_SHOT_SEED = 1234  # of the examples that a task draws: the harness' own default
_TOLD = ("results", "groups", "group_subtasks", "versions", "n-shot", "n-samples", "higher_is_better")
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NEUTRAL = ("until", "max_gen_toks", "do_sample")

Pair = tuple[Any, list[int], list[int]]
"""What was asked, the ids of a context and those of a continuation, which are scored."""


class HarnessModel(TemplateLM):
    """A run as the harness sees a model.

    Raises:
      UsageError: a model with an encoder.
    """

    def __init__(self, run: LoadedModel):
        super().__init__()
        if run.model.encoder is not None:
            raise UsageError("encoder is given, and tasks are for models that predict from the first token on",
                             where="config.model", do="Score texts: lm eval --text.")  # fmt: skip
        self._run, self._mesh = run, make_mesh(MeshConfig())
        self._score = log_prob_fn(run.model, self._mesh, read=_log_prob_and_greedy)
        self.max_length = run.model.context_length

    @property
    def eot_token_id(self) -> int:
        return self._run.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._run.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, which begins a document unless `add_special_tokens` is False."""
        ids = self._run.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Log-probability in nats of each continuation after its context, and whether each token was the likeliest."""
        answers: list[Any] = [None] * len(requests)
        by_window = defaultdict(list)
        for place, (_asked, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(f"a continuation has {len(continuation)} tokens", where=repr(requests[place][0])[:200],
                                 do=f"The model can score 1 to {self.max_length} after a context.")  # fmt: skip
            row = np.array((context + continuation)[-self.max_length - 1 :], np.int32)
            by_window[min(bucket(len(row) - 1), self.max_length)].append((place, row, len(continuation)))
        for window, asked in by_window.items():
            numbers_NT2 = self._score_rows([row for _, row, _ in asked], window)
            for (place, row, count), numbers_T2 in zip(asked, numbers_NT2, strict=True):
                log_prob_C, greedy_C = numbers_T2[len(row) - 1 - count : len(row) - 1].T.astype(np.float64)
                if not np.isfinite(log_prob_C).all():
                    raise RunError("a log-probability is not finite",
                                   do="The parameters are not usable: take an earlier checkpoint.")  # fmt: skip
                answers[place] = float(log_prob_C.sum()), bool(greedy_C.all())
        return answers

    def _score_rows(self, rows: Sequence[np.ndarray], window: int) -> np.ndarray:
        """For each row (at most window + 1 ids) and each of its ids but the first, the two numbers [N, window, 2].

        Rows are filled up behind their end, where causality keeps it from being seen.
        """
        tokens_NW = np.full((len(rows), window + 1), self.eot_token_id, np.int32)
        for filled, row in zip(tokens_NW, rows, strict=True):
            filled[: len(row)] = row
        starts = np.arange(len(rows)) * (window + 1)
        stream = Stream(tokens_NW.reshape(-1), starts, self._run.tokenizer.token_bytes, Bos.NONE)
        at_once = min(rows_at_once(window, self._mesh), -(-len(rows) // self._mesh.size) * self._mesh.size)
        scored = score_windows(self._score, self._run.params, stream, starts, window, at_once)
        return scored.log_probs.reshape(len(rows), window, 2)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each whole text, its first token after the one that begins documents."""
        del disable_tqdm
        windows: list[Pair] = []
        text_of = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((request.args[0], *make_disjoint_window(pair)))
                text_of.append(number)
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return np.bincount(np.array(text_of, np.int64), scores, minlength=len(requests)).tolist()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """An answer to each prompt, up to the first of the task's stop strings or the end of text."""
        del disable_tqdm
        answers = [""] * len(requests)
        by_settings = defaultdict(list)
        for place, request in enumerate(requests):
            by_settings[json.dumps(request.args[1], sort_keys=True)].append(place)
        for told, places in by_settings.items():
            settings = _settings(normalize_gen_kwargs(json.loads(told)), self.max_length)
            room = self.max_length - settings["max_tokens"]
            prompts = {place: np.array(self.tok_encode(requests[place].args[0])[-room:]) for place in places}
            order = sorted(places, key=lambda place: -len(prompts[place]))  # prompts of one length are read together
            found = generate(self._decoder, [prompts[place] for place in order], **settings)
            for place, completion in zip(order, found, strict=True):
                answers[place] = completion.text.decode(errors="replace")
        return answers

    @functools.cached_property
    def _decoder(self) -> Decoder:
        return load_decoder(self._run)


def run_tasks(run: LoadedModel, tasks: Sequence[str]) -> dict[str, Any]:
    """What the harness finds of a run on its tasks: results by task, with versions, shots and counts of samples.

    Args:
      tasks: names of the harness' own tasks, groups or tags, or YAML files. A group in a file finds its tasks in the
        files beside it.

    Raises:
      UsageError: a task that is not there or cannot be carried out as it is written.
      RunError: log-probabilities that are not finite.
    """
    random.seed(0)  # some tasks draw when they are read
    np.random.seed(FEW_SHOT_SEED)  # noqa: NPY002 - the generator that they use
    with contextlib.redirect_stdout(sys.stderr):  # what it prints on the way is no result
        with _told(tasks):
            loaded = _manager(tasks).load(list(tasks))
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=FEW_SHOT_SEED)
        with _told(loaded["tasks"]):
            found = evaluate(HarnessModel(run), loaded, bootstrap_iters=BOOTSTRAP, log_samples=False)
    assert found is not None  # it is None on other processes than the first
    return finite({"step": run.step, **{name: found[name] for name in _TOLD if name in found}})


def as_text(found: dict[str, Any]) -> str:
    """The harness' own tables, and the step of the checkpoint."""
    tables = [make_table(found)] + ([make_table(found, "groups")] if "groups" in found else [])
    return "\n".join([*tables, f"checkpoint step {found['step']:,}"])


def _manager(tasks: Sequence[str]) -> TaskManager:
    files = [Path(task) for task in tasks if Path(task).suffix in (".yaml", ".yml")]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UsageError("there is no such task file", where=str(missing[0]))
    beside = sorted({str(path.parent) for path in files})
    # Its own tasks are thousands of files, which take seconds to look through.
    return TaskManager(include_path=beside or None, include_defaults=len(files) < len(tasks))


@contextlib.contextmanager
def _told(tasks: Any):
    """Turns whatever a task's own code, files or templates raise into one line."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise UsageError(f"the harness cannot carry it out: {type_and_line(error)}", where=", ".join(tasks)) from error


def _settings(asked: dict[str, Any], context: int) -> dict[str, Any]:
    """The arguments of `lm.decode.generate` that a task's generation_kwargs stand for."""
    unknown = sorted(set(asked) - {*_SETTINGS, *_NEUTRAL})
    if unknown:
        raise UsageError(f"generation_kwargs {', '.join(unknown)} are not supported", where="the task",
                         do=f"Supported: {', '.join((*_NEUTRAL, *_SETTINGS))}.")  # fmt: skip
    tokens = asked["max_gen_toks"]
    if not 0 < tokens < context:
        raise UsageError(f"answers of {tokens} tokens leave no room for a prompt in the model's context of {context}",
                         where="the task", do="Set max_gen_toks in its generation_kwargs.")  # fmt: skip
    given = {name: asked[name] for name in _SETTINGS if name in asked}
    if not asked["do_sample"]:
        given["temperature"] = 0.0
    return {**given, "max_tokens": tokens, "stop": [text for text in asked["until"] if text]}


def _log_prob_and_greedy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Of each target its log-probability, and 1 where it is the likeliest token, else 0: float32 [B, T, 2]."""
    greedy_BT = jnp.argmax(logits_BTV, axis=-1) == targets_BT
    return jnp.stack([token_log_probs(logits_BTV, targets_BT), greedy_BT.astype(jnp.float32)], axis=-1)
