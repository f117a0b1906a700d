"""One number for a token, whoever reports it: training, `lm eval --per-token`, or the decoder that wrote it."""

import json
from functools import partial

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.cli import main
from lm.decode import generate, load_decoder
from lm.model.cache import empty_cache
from lm.model.score import evaluation_windows, token_log_probs
from lm.model.transformer import Transformer
from tests.train.tiny import corpus, rows, run_config

LETTERS = {i: -np.inf for i in range(257) if chr(i) not in "abcdefgh"}


@pytest.fixture(scope="module", params=[None, 6], ids=["all", "window"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    sliding = [] if request.param is None else [f"model.window={request.param}"]
    config = run_config(corpus(folder), "model.context_length=48", "eval_tokens=100000", *sliding)
    loop.train(config, folder / "run")
    return folder / "run"


def per_token(run, text, capsys):
    """Log-probabilities of the tokens of a text, by `lm eval`; the first is that of the first byte."""
    path, out = run.parent / "scored.txt", run.parent / "tokens.jsonl"
    path.write_text(text)
    assert main(["eval", "--checkpoint", str(run), "--text", str(path), "--per-token", str(out)]) == 0
    capsys.readouterr()
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_what_decoding_reports_is_what_scoring_finds(run, capsys):
    decoder = load_decoder(run)
    prompts = ["abc", "hg fed cba abc"]
    # Letters alone, so that the answer is a text; the log-probabilities of the model know nothing of the bias.
    greedy, _ = generate(decoder, prompts, max_tokens=30, temperature=0, logit_bias=LETTERS, end_ids=())
    _, sampled = generate(decoder, prompts, max_tokens=30, temperature=1.5, logit_bias=LETTERS, end_ids=(), seed=1)
    for prompt, answer in zip(prompts, (greedy, sampled), strict=True):
        scored = per_token(run, prompt + answer.text.decode(), capsys)[len(prompt) :][:30]
        assert [row["token"] for row in scored] == answer.tokens.tolist()
        np.testing.assert_allclose(answer.log_probs, [row["log_prob"] for row in scored], atol=1e-4)


@pytest.mark.slow
def test_the_loss_of_training_is_what_the_cached_model_finds(run):
    [last] = [row for row in rows(run, "eval") if row["step"] == 12]
    tokens = np.fromfile(next((run / "data").glob("*/validation.bin")), np.uint16).astype(np.int32)
    starts = evaluation_windows(len(tokens), 48, last["scored"] // 48)
    inputs_BT, targets_BT = (np.stack([tokens[at + k : at + k + 48] for at in starts]) for k in (0, 1))
    decoder, found = load_decoder(run), []
    cache, full_B = empty_cache(decoder.config, len(starts), 48), np.full(len(starts), 16, np.int32)
    read = jax.jit(partial(decoder.model.apply, method=Transformer.extend))
    for first in range(0, 48, 16):
        part = slice(first, first + 16)
        logits_BTV, cache = read({"params": decoder.params}, inputs_BT[:, part], full_B, cache)
        found.append(token_log_probs(logits_BTV, targets_BT[:, part]))
    assert np.size(found) == last["scored"]
    # float32 log-probabilities of a few nats, in other batches and through a cache.
    assert -np.mean(found) == pytest.approx(last["loss"], abs=1e-5)
