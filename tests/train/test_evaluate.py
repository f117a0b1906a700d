"""`lm eval`: the scorer of training on any text, and one line for each wrong request."""

import json
import math
import random

import numpy as np
import pytest

import lm.train.loop as loop
from lm.cli import main
from tests.train.tiny import corpus, run_config

pytestmark = pytest.mark.slow  # compilations: about a second or more each


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    config = run_config(corpus(folder), "eval_tokens=100000")
    loop.train(config, folder / "run")
    return folder


def evaluated(capsys, *arguments) -> dict:
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def held_out(run) -> str:
    """The validation documents of the run, as text, in their order."""
    tokens = np.fromfile(next((run / "run" / "data").glob("*/validation.bin")), np.uint16)
    pieces = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode().split("\0")
    return "\n\n".join(piece for piece in pieces if piece)


def test_the_loss_of_training_and_the_loss_of_lm_eval_are_one_number(run, capsys):
    path = run / "held.txt"
    path.write_text(held_out(run))
    found = evaluated(capsys, "--checkpoint", run / "run", "--text", path, "--separator", "\\n\\n")
    rows = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row["kind"] == "eval" and row["step"] == 12]
    # Training scores whole windows only, so its last few tokens may be missing; here the sets are made equal.
    whole = last["scored"]
    per_token = run / "tokens.jsonl"
    evaluated(capsys, "--checkpoint", run / "run", "--text", path, "--separator", "\\n\\n", "--per-token", per_token)
    losses = [-json.loads(line)["log_prob"] for line in per_token.read_text().splitlines()]
    assert len(losses) == found["tokens"]
    assert np.mean(losses[:whole]) == pytest.approx(last["loss"], abs=1e-6)  # float32 log-probabilities, other batches


def test_the_numbers_are_one_number_in_other_units_and_say_how_they_were_made(run, capsys):
    text = run / "text.txt"
    text.write_text("".join(random.Random(1).choices("abc def", k=333)))
    found = evaluated(capsys, "--checkpoint", run / "run", "--text", text)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    assert found["bits_per_token"] == pytest.approx(found["nats_per_token"] / math.log(2))
    assert found["tokens"] == 334  # 333 bytes and the end of the document
    assert found["bytes"] == 333
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"] * 334 / 333)
    assert (found["window"], found["stride"], found["step"]) == (16, 16, 12)
    assert "end-of-text token put in front" in found["bos"]
    assert main(["eval", "--checkpoint", str(run / "run"), "--text", str(text)]) == 0
    printed = capsys.readouterr().out
    assert "window       16 tokens, stride 16" in printed
    assert "BOS" in printed


def test_each_token_is_scored_once_at_any_stride(run, capsys):
    text = run / "text.txt"
    text.write_text("abcabc abd " * 11)
    for stride in (1, 5, 16):
        per_token = run / f"{stride}.jsonl"
        arguments = ("--checkpoint", run / "run", "--text", text, "--stride", stride, "--per-token", per_token)
        found = evaluated(capsys, *arguments)
        indices = [json.loads(line)["index"] for line in per_token.read_text().splitlines()]
        assert indices == list(range(1, found["tokens"] + 1))


def test_a_window_beyond_the_text_is_the_whole_text(run, capsys):
    text = run / "text.txt"
    text.write_text("abcabc abd ")
    found = evaluated(capsys, "--checkpoint", run / "run", "--text", text, "--window", 10**12)
    assert (found["window"], found["stride"], found["tokens"]) == (12, 12, 12)
    whole = evaluated(capsys, "--checkpoint", run / "run", "--text", text, "--window", 12)
    assert found == whole


def test_several_texts_are_scored_as_each_alone(run, capsys):
    texts = {"one": "abcabc abd " * 9, "two": "dba"}
    paths = {name: run / f"{name}.txt" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    asked = [part for path in paths.values() for part in ("--text", path)]
    found = evaluated(capsys, "--checkpoint", run / "run", *asked)
    for path in paths.values():
        assert found[str(path)] == evaluated(capsys, "--checkpoint", run / "run", "--text", path)
    command = ["eval", "--checkpoint", str(run / "run"), *map(str, asked)]
    assert main(command) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    for line, (path, score) in zip(lines, found.items(), strict=False):
        assert line.split()[:4] == [path, f"{score['nats_per_token']:.4f}", "-", f"{score['bits_per_byte']:.4f}"]
    assert main([*command, "--per-token", str(run / "tokens.jsonl")]) == 2
    assert "--per-token: is of one text" in capsys.readouterr().err


def test_the_record_of_a_run_is_a_config_file(run, capsys):
    assert main(["count", "--config", str(run / "run" / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"--text": "none.txt"}, "no such file"),
        ({"--stride": "17"}, "stride 17"),
        ({"--window": "0"}, "window"),
        ({"--checkpoint": "nowhere"}, "not a run folder"),
        ({"--per-token": ".", "--text": "none.txt"}, "is a folder"),  # said before anything is read
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(run, capsys, wrong, said):
    text = run / "text.txt"
    text.write_text("abc")
    arguments = {"--checkpoint": str(run / "run"), "--text": str(text), **wrong}
    assert main(["eval", *(part for pair in arguments.items() for part in pair)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
