"""A recurrent model answers in every way that a state allows; what would need an older state is refused by name."""

import json

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.decode.beam import Beams, beam_search
from lm.decode.generate import Decoder
from lm.decode.request import Request
from lm.decode.speculate import speculate
from lm.model.config import CacheDtype, Mixer, Positions
from tests.decode import letters
from tests.model import variants
from tests.train.tiny import config_file, corpus, rows

V, G = 4, 3
SMALL = letters.config(V, mixer=Mixer.LSTM, n_head=1, positions=Positions.NONE)


def test_a_draft_and_int8_are_refused_by_name():
    recurrent, attending = letters.decoder(SMALL), letters.decoder(letters.config(V))
    for pair, told in (((recurrent, attending), "the target's mixer is lstm"),
                       ((attending, recurrent), "the draft's mixer is lstm")):  # fmt: skip
        with pytest.raises(UsageError, match=f"{told}: its state cannot go back"):
            speculate(*pair, [np.array([1])], Request(max_tokens=2))
    with pytest.raises(UsageError, match="mixer is lstm: there are no keys and values to keep in int8"):
        Decoder(SMALL, variants.parameters(SMALL), letters.Letters(V), cache_dtype=CacheDtype.INT8)


@pytest.mark.slow
def test_every_beam_goes_on_from_its_own_state():
    decoder, answers = letters.decoder(SMALL, 1.0), letters.all_answers(V, G)
    prompts = [np.array([3, 1, 0]), np.array([2])]
    found = beam_search(decoder, prompts, Request(max_tokens=G, end_ids=()), Beams(V ** (G - 1), best=8))
    for prompt, ranked in zip(prompts, found, strict=True):
        total = letters.log_probs(SMALL, prompt, answers, 1.0).sum(axis=1)
        best = np.argsort(-total)[:8]
        np.testing.assert_array_equal([answer.completion.tokens for answer in ranked], answers[best])
        np.testing.assert_allclose([answer.score for answer in ranked], total[best], atol=1e-4)  # as in test_beam


@pytest.mark.full
def test_a_gru_trains_answers_and_is_scored_from_the_command_line(tmp_path, capsys):
    text, run = corpus(tmp_path), str(tmp_path / "run")
    shape = {"mixer": "gru", "n_head": 1, "positions": "none", "feed_forward": "none", "d_ff": 0}
    options = [f"--config.model.{name}={value}" for name, value in shape.items()]
    config = config_file(tmp_path, text, steps=40, log_every=10)
    assert main(["train", "--config", str(config), "--workdir", run, *options]) == 0
    losses = [row["loss"] for row in rows(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] - 1  # from ln 257 nats, of a few letters
    capsys.readouterr()
    asked = ("--prompt", "abc ", "--max-tokens", "8", "--temperature", "0", "--ignore-end", "--json")
    assert main(["generate", "--checkpoint", run, *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["tokens"]) == 8
    per_token = tmp_path / "scored.jsonl"
    (tmp_path / "answer.txt").write_text("abc " + answer["text"])
    scored = ("--text", str(tmp_path / "answer.txt"), "--per-token", str(per_token))
    assert main(["eval", "--checkpoint", run, *scored]) == 0
    nats = [json.loads(line)["log_prob"] for line in per_token.read_text().splitlines()]
    np.testing.assert_allclose(nats[4:12], answer["log_probs"], atol=1e-4)
    assert main(["generate", "--checkpoint", run, "--cache", "int8", *asked]) == 2
    assert "mixer is gru" in capsys.readouterr().err
