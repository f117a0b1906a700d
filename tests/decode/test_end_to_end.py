"""Every way to answer, and compression, from the command line on runs that `lm train` made: nothing is stubbed."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from lm.cli import main
from tests.train.tiny import config_file, corpus

pytestmark = pytest.mark.slow  # compilations: about a second or more each

CONTEXT = 64
# One prompt and one limit everywhere: what differs in numbers alone is one program.
ASKED = ("--prompt", "abc ", "--max-tokens", "12", "--ignore-end")
SCHEMA = {"type": "array", "items": {"type": ["integer", "null"], "maximum": 9}, "minItems": 2, "maxItems": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and what it was at half of its training, which can draft for it."""
    folder = tmp_path_factory.mktemp("runs")
    config = config_file(folder, corpus(folder), steps=30, checkpoint_every=15, checkpoints_kept=2)
    shape = f"--config.model.context_length={CONTEXT}"
    assert main(["train", "--config", str(config), "--workdir", str(folder / "run"), shape]) == 0
    shutil.copytree(folder / "run", folder / "draft")
    shutil.rmtree(folder / "draft" / "checkpoints" / "30")
    return folder


@pytest.fixture
def lm(runs, capsys):
    """Runs a command on the run; gives what it printed, and the JSON lines of it where it did so."""

    def call(command, *arguments, code=0):
        capsys.readouterr()
        assert main([command, "--checkpoint", str(runs / "run"), *map(str, arguments)]) == code
        return capsys.readouterr()

    return call


@pytest.fixture
def samples(lm):
    return lambda *arguments: [json.loads(line) for line in lm("generate", *arguments, "--json").out.splitlines()]


@pytest.fixture
def greedy(samples):
    [found] = samples(*ASKED, "--temperature", "0")
    return found


def test_what_leaves_one_token_is_greedy_whatever_the_seed(samples, greedy):
    for only in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1"), ("--temperature", "1e-20")):
        [found] = samples(*ASKED, *only, "--seed", "7")
        assert found["tokens"] == greedy["tokens"], only
    [sampled] = samples(*ASKED, "--temperature", "2", "--seed", "7")
    assert sampled["tokens"] != greedy["tokens"]


def test_penalties_and_biases_in_the_order_that_is_saved(lm, tmp_path):
    order = "bias,presence,repetition,temperature,top-k,top-p,min-p"
    lm("generate", *ASKED, "--temperature", "0", "--repetition-penalty", "1.5", "--presence-penalty", "1000",
       "--frequency-penalty", "1", "--logit-bias", "100=-inf", "--order", order, "--out", tmp_path / "s")  # fmt: skip
    header, sample = map(json.loads, (tmp_path / "s").read_text().splitlines())
    kept = [*b"abc ", *sample["tokens"]]
    assert len(set(kept)) == len(kept) == 4 + 12  # nothing twice, what the prompt has among it
    assert 100 not in kept
    steps = [step["step"] for step in header["settings"]["strategy"]]
    assert steps == ["LogitBias", "PresencePenalty", "RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]


def test_beams_are_ranked_and_say_what_they_are(samples, lm):
    ranked = samples(*ASKED, "--beams", "3", "--best", "3", "--length-alpha", "0.5", "--length-form", "power")
    assert [found["score"] for found in ranked] == sorted((found["score"] for found in ranked), reverse=True)
    for found in ranked:
        assert found["score"] == pytest.approx(sum(found["log_probs"]) / 12**0.5, abs=1e-4)
    shown = lm("generate", *ASKED, "--beams", "3", "--best", "3")
    assert shown.out.count("== prompt 0, sample ") == shown.out.count(": length, score -") == 3
    settings = json.loads(shown.err.splitlines()[0].removeprefix("settings: "))
    assert (settings["beams"]["width"], settings["strategy"], settings["seed"]) == (3, None, None)


def test_a_draft_changes_no_greedy_answer_and_its_work_is_told(runs, lm, greedy):
    printed = lm("generate", *ASKED, "--temperature", "0", "--draft", runs / "draft", "--draft-tokens", "2", "--json")
    assert json.loads(printed.out)["tokens"] == greedy["tokens"]
    assert re.search(r"of \d+ drafted tokens accepted; \d\.\d+ passes of the target a token", printed.err)


def test_the_best_of_several_is_the_likeliest_of_them(samples):
    several = samples(*ASKED, "--n", "4", "--seed", "3")
    [best] = samples(*ASKED, "--best-of", "4", "--seed", "3")
    means = [np.mean(found["log_probs"]) for found in several]
    assert best["tokens"] == several[int(np.argmax(means))]["tokens"]
    assert best["score"] == pytest.approx(max(means), abs=1e-5)


def test_answers_match_the_expression_or_the_schema_to_the_last_token(samples, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for temperature in ("0", "1.5"):
        [found] = samples(*ASKED, "--temperature", temperature, "--regex", "[a-c]{3}(-[0-9]+)?")
        assert re.fullmatch("[a-c]{3}(-[0-9]+)?", found["text"])
        [found] = samples(*ASKED, "--temperature", temperature, "--schema", tmp_path / "schema.json")
        jsonschema.validate(json.loads(found["text"]), SCHEMA)
        assert found["finish"] == "end"


def test_a_stop_string_ends_before_itself(lm, samples, greedy):
    stop = greedy["text"][3:5]
    [found] = samples(*ASKED, "--temperature", "0", "--stop", stop, "--stop", "never there")
    assert (found["text"], found["finish"]) == (greedy["text"].partition(stop)[0], "stop")
    shown = lm("generate", *ASKED, "--temperature", "0", "--stop", stop)
    assert (shown.out, "finish: stop" in shown.err) == (found["text"] + "\n", True)


def test_an_int8_cache_is_near(samples, greedy):
    [found] = samples(*ASKED, "--temperature", "0", "--cache", "int8")
    # The first token comes from the prompt's own pass; what is read back has steps of 1/127 of a head's largest.
    assert found["log_probs"][0] == pytest.approx(greedy["log_probs"][0], abs=1e-4)
    assert found["log_probs"] == pytest.approx(greedy["log_probs"], abs=0.3)


def test_the_end_of_the_context(lm, samples):
    room = CONTEXT - 51 + 1  # the last token needs no place
    long, too_long = "a" * 50, "a" * CONTEXT
    told = lm("generate", "--prompt", "a", "--prompt", long, "--max-tokens", "20", "--json", code=2)
    assert "prompt 1 fills 51 tokens of context and 20 more are asked for" in told.err
    assert f"at most {room}" in told.err
    [found] = samples("--prompt", long, "--ignore-end")
    assert (found["finish"], len(found["tokens"])) == ("context", room)
    assert "none can follow" in lm("generate", "--prompt", too_long, code=2).err
    assert "none can follow" in lm("generate", "--prompt", too_long, "--max-tokens", "20", code=2).err
    [found] = samples("--prompt", too_long, "--full", "stop")
    assert (found["finish"], found["text"], found["tokens"]) == ("context", "", [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--beams 2 --temperature 0.5", "--beams takes the likeliest"),
        ("--beams 2 --draft {draft}", "--beams takes the likeliest"),
        ("--beams 2 --best-of 2", "--beams takes the likeliest"),
        ("--beams 2 --n 2", "samples: beam search"),
        ("--beams 2 --stop x", "stops: beam search"),
        ("--beams 2 --regex a+", "constraint: beam search"),
        ("--beams 0", "0 beams"),
        ("--best 2", "--best is about --beams"),
        ("--length-alpha 1", "--length-alpha is about --beams"),
        ("--draft-tokens 2", "--draft-tokens is about --draft"),
        ("--draft {draft} --draft-tokens 0", "0 tokens are to be drafted"),
        ("--draft {draft} --regex a+", "speculative sampling has no constraints"),
        ("--draft nowhere", "not a run folder"),
        ("--best-of 2 --n 3", "--best-of and --n"),
        ("--best-of 0", "0 samples"),
        ("--regex a+ --stop a", "a stop string would cut"),
        ("--regex (", "not a regular expression"),
        ("--regex [0-9]{{20}}", "the shortest answer under the constraint has 20 tokens"),
        ("--schema nowhere.json", "no such schema"),
        ("--json --out x", "--json prints the lines"),
    ],
)
def test_what_makes_no_sense_together_is_one_line(runs, lm, arguments, told):
    printed = lm("generate", "--prompt", "a", "--max-tokens", "8", *arguments.format(draft=runs / "draft").split(),
                 code=2)  # fmt: skip
    [line] = [line for line in printed.err.splitlines() if not line.startswith("settings: ")]
    assert line.startswith("lm generate: ")
    assert told in line
    assert printed.out == ""
    assert not Path("x").exists()


RANDOM = np.random.default_rng(0).integers(0, 256, 150, np.uint8).tobytes()


@pytest.mark.parametrize("data", [b"abc cab bca\n" * 20, RANDOM, b"", b"a" * 300], ids=["text", "random", "empty", "a"])
def test_a_file_comes_back_from_another_command(lm, tmp_path, data):
    file, packed, back = (tmp_path / name for name in ("file", "file.lmz", "back"))
    file.write_bytes(data)
    lm("compress", file)
    assert f"{len(data):,} bytes, all checks passed" in lm("decompress", packed, "--out", back).out
    assert back.read_bytes() == data


def test_another_model_a_flipped_byte_and_a_foreign_file_are_refused(runs, lm, tmp_path, capsys):
    file, packed, back = (tmp_path / name for name in ("file", "file.lmz", "back"))
    file.write_bytes(RANDOM)
    lm("compress", file)
    assert main(["decompress", str(packed), "--checkpoint", str(runs / "draft"), "--out", str(back)]) == 2
    assert "compressed with.model: " in capsys.readouterr().err
    content = bytearray(packed.read_bytes())
    content[-10] ^= 1
    packed.write_bytes(content)
    assert "is damaged in block 1 of 1" in lm("decompress", packed, "--out", back, code=1).err
    assert "was not written by `lm compress`" in lm("decompress", file, "--out", back, code=2).err
    assert not back.exists()
