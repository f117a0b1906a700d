"""`lm generate` and `lm.decode.generate` on a whole run folder: what is printed, what is saved, what is refused."""

import json

import numpy as np
import pytest

import lm.decode
from lm.base.errors import UsageError
from lm.cli import main
from lm.decode import Decoder, Finish, generate, load_decoder
from lm.decode.command import read_prompts
from lm.run.restore import load_model
from lm.train.loop import train
from lm.train.restore import load_run
from tests.train.tiny import corpus, run_config

pytestmark = pytest.mark.slow  # compilations: about a second or more each


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(run_config(corpus(folder), "steps=4", "model.context_length=64", "checkpoint_every=4"), folder / "run")
    return folder / "run"


def call(capsys, run, *arguments, code=0):
    assert main(["generate", "--checkpoint", str(run), *arguments]) == code
    return capsys.readouterr()


def test_a_run_can_be_loaded_with_and_without_its_training(run):
    loaded, whole = load_model(run), load_run(run)
    assert (loaded.step, loaded.model) == (whole.step, whole.config.model)
    assert isinstance(load_decoder(whole), Decoder)


def test_python_takes_a_folder_a_loaded_run_or_a_decoder(run):
    decoder = load_decoder(run)
    wanted = [answer.text for answer in generate(decoder, "ab", max_tokens=8, n=2, seed=1)]
    assert len(set(wanted)) == 2
    for model in (str(run), run, load_run(run)):
        assert [answer.text for answer in generate(model, ["ab"], max_tokens=8, n=2, seed=1)] == wanted
    in_parts = generate(decoder, ["x", "ab", "y"], max_tokens=8, n=2, seed=1, batch_size=2)
    assert len(in_parts) == 6
    greedy = [generate(decoder, "ab", max_tokens=8, temperature=0, seed=seed)[0].text for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    with pytest.raises(UsageError, match="temperature is -1"):
        generate(decoder, "ab", temperature=-1)
    with pytest.raises(UsageError, match="no prompt"):
        generate(decoder, [])
    assert set(lm.decode.__all__) <= set(dir(lm.decode))


def test_one_prompt_streams_the_answer_that_a_file_holds(run, tmp_path, capsys):
    arguments = ("--prompt", "abc", "--max-tokens", "8", "--seed", "5", "--ignore-end", "--top-p", "0.9")
    shown = call(capsys, run, *arguments)
    told = call(capsys, run, *arguments, "--out", str(tmp_path / "a.jsonl"))
    assert told.out == ""
    header, sample = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert shown.out == sample["text"] + "\n"
    assert "finish: length" in shown.err
    assert "tokens/s" in shown.err
    settings = header["settings"]
    assert [step["step"] for step in settings["strategy"]] == ["Temperature", "TopK", "TopP", "MinP"]
    assert settings["strategy"][2] == {"step": "TopP", "p": 0.9}
    assert (settings["step"], settings["seed"], settings["end_ids"], settings["full"]) == (4, 5, [], "error")
    assert {"jax", "commit", "python"} <= settings["versions"].keys()
    assert json.loads(shown.err.splitlines()[0].removeprefix("settings: ")).items() <= settings.items()
    assert (sample["prompt"], sample["finish"], len(sample["tokens"])) == ("abc", "length", 8)
    assert len(sample["log_probs"]) == len(sample["strategy_log_probs"]) == 8


def test_a_file_of_prompts_gives_samples_in_order_and_json_is_what_python_gives(run, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n\n{"prompt": "", "other": 1}\n{"prompt": "cd"}\n')
    printed = call(capsys, run, "--prompts", str(tmp_path / "p.jsonl"), "--n", "2", "--max-tokens", "8", "--json",
                   "--batch-size", "4")  # fmt: skip
    samples = [json.loads(line) for line in printed.out.splitlines()]
    assert [(sample["prompt"], sample["sample"]) for sample in samples] == [
        ("ab", 0), ("ab", 1), ("", 0), ("", 1), ("cd", 0), ("cd", 1),
    ]  # fmt: skip
    wanted = generate(run, ["ab", "", "cd"], max_tokens=8, n=2, batch_size=4)
    assert [sample["tokens"] for sample in samples] == [answer.tokens.tolist() for answer in wanted]
    assert [Finish[sample["finish"].upper()] for sample in samples] == [answer.finish for answer in wanted]
    several = call(capsys, run, "--prompt", "ab", "--prompt", "", "--n", "2", "--max-tokens", "8", "--batch-size", "4")
    assert several.out.count("== prompt ") == 4


def test_prompts_are_lines_or_the_prompt_of_each_json_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert read_prompts(tmp_path / "a.txt") == ["one", " two "]
    (tmp_path / "a.jsonl").write_text('{"prompt": "line\\nbreak"}\n')
    assert read_prompts(tmp_path / "a.jsonl") == ["line\nbreak"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"\xff", "is not UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', 'a.jsonl:2: is not a JSON object with "prompt"'),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: is not"),
        ("a.jsonl", b'{"prompt": 3}\n', "a.jsonl:1: the prompt is int"),
        ("missing.txt", None, "no such file of prompts"),
    ],
)
def test_a_file_without_prompts_is_one_clear_error(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=told):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0"),
        (["--order", "top-p,heat"], "no step 'heat'"),
        (["--logit-bias", "x=1"], "'x=1' is not ID=BIAS"),
        (["--logit-bias", "999=1"], "no token 999"),
        (["--end-id", "999"], "no token 999"),
        (["--end-id", "3", "--ignore-end"], "say opposite things"),
        (["--stop", ""], "empty"),
        (["--max-tokens", "0"], "0 tokens"),
        (["--max-tokens", "900"], "over the 64"),
        (["--n", "0"], "0 samples"),
        (["--batch-size", "0", "--json"], "0 answers at once"),
        (["--out", "."], "is a folder"),
        (["--seed", "-1"], "seed is -1"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(run, capsys, arguments, told):
    printed = call(capsys, run, "--prompt", "a", *arguments, code=2)
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert "not a run folder" in call(capsys, tmp_path, "--prompt", "a", code=2).err


def test_an_answer_that_fails_leaves_no_file(run, tmp_path, capsys):
    out = tmp_path / "a.jsonl"
    call(capsys, run, "--prompt", "a" * 60, "--max-tokens", "8", "--out", str(out), code=2)
    assert not out.exists()
    cut = call(capsys, run, "--prompt", "a" * 60, "--max-tokens", "8", "--full", "stop", "--ignore-end", "--json")
    assert json.loads(cut.out)["finish"] == "context"
    assert len(json.loads(cut.out)["tokens"]) == 64 - 61 + 1


def test_a_prompt_given_as_ids_is_taken_as_it_is(run):
    decoder = load_decoder(run)
    ids = np.concatenate([[decoder.tokenizer.eos_id], decoder.tokenizer.encode("ab")])
    text, same = (generate(decoder, [prompt], max_tokens=8)[0] for prompt in ("ab", ids))
    assert np.array_equal(text.tokens, same.tokens)
