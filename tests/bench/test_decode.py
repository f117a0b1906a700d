"""`lm bench decode`: peers compute our function, rows keep the contract, limits count what is read."""

import dataclasses
import json
import os

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.bench import command, decode, limits
from lm.bench.decode import Answers, Case, disagreement, gpt2, llama, peers_of, random_params, read_bytes
from lm.bench.peer import find_python, running, save_start
from lm.bench.rows import chosen
from lm.cli import main
from lm.model.config import Dtype

TINY = Case("tiny", gpt2(2, 16, 2, 40), batch=2)
GROUPED = Case("tiny-llama", llama(2, 16, 4, 2, 24, 40), batch=2)
PROMPT, ANSWER = 16, 12


def prompts(case: Case) -> np.ndarray:
    return np.random.default_rng(1).integers(case.config.vocab_size, size=(case.batch, PROMPT), dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("case", [TINY, GROUPED], ids=lambda case: case.name)
def test_transformers_computes_our_function(case, tmp_path):
    torch_python = find_python(os.environ.get("LM_PEER_PYTHON"), "transformers")
    if torch_python[0] is None:
        pytest.skip(torch_python[1])
    params, prompts_BT = random_params(case.config), prompts(case)
    save_start(tmp_path / "start.npz", params, prompts=prompts_BT)
    ours = Answers(case.config, params, prompts_BT, ANSWER, ANSWER)
    generate, _ = peers_of(case.config, torch_python, tmp_path, ANSWER)
    with running(generate) as started:
        started.ready()
    found = tmp_path / generate.spec["answer"]
    assert disagreement(found, ours.first_tokens_BG, ours.logits_BV(), Dtype.FLOAT32) == ""


def test_another_function_is_refused_and_nan_is_another(tmp_path):
    tokens_BG = np.arange(40).reshape(1, 40)
    logits_BV = np.linspace(-1, 1, 5)[None]

    def refusal(tokens=tokens_BG, logits=logits_BV, dtype=Dtype.FLOAT32) -> str:
        np.savez(tmp_path / "answer.npz", tokens=tokens, logits=logits)
        return disagreement(tmp_path / "answer.npz", tokens_BG, logits_BV, dtype)

    parts_late, parts_early = tokens_BG.copy(), tokens_BG.copy()
    parts_late[0, decode.SAME_TOKENS] += 1
    parts_early[0, decode.SAME_TOKENS - 1] += 1
    assert refusal() == ""
    assert refusal(tokens=parts_late) == ""
    assert f"first {decode.SAME_TOKENS - 1} tokens" in refusal(tokens=parts_early)
    assert refusal(tokens=parts_early, dtype=Dtype.BFLOAT16) == ""
    assert "logits" in refusal(logits=logits_BV + 0.01)
    assert "logits" in refusal(logits=logits_BV * np.nan)
    assert "tokens" in refusal(tokens=tokens_BG[:, :-1])


def test_what_a_step_reads_is_the_published_size():
    config = next(case.config for case in decode.CASES if case.model == "gpt2-124m")
    # 124.44 M parameters without 1,024 x 768 positions in float32, and 18.9 MB of keys and values at 256 tokens.
    assert read_bytes(config, 1, 0) / 1e6 == pytest.approx(494.6, abs=0.1)
    assert (read_bytes(config, 1, 256) - read_bytes(config, 1, 0)) / 1e6 == pytest.approx(18.9, abs=0.1)
    half = dataclasses.replace(config, dtype=Dtype.BFLOAT16)
    assert read_bytes(half, 1, 256) * 2 == read_bytes(config, 1, 256)
    untied = dataclasses.replace(config, tied_embedding=False)
    assert read_bytes(untied, 1, 256) == read_bytes(config, 1, 256)


@pytest.mark.slow
def test_the_rows_keep_the_contract_with_pytorch_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "find_python", lambda asked, module: (None, f"no interpreter with {module}"))
    for name, value in {"PROMPT": PROMPT, "ANSWER": ANSWER, "LONGER": 40, "CASES": (TINY, GROUPED)}.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(limits, "MATMUL_SIDES", (32, 48))
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 16)
    file = tmp_path / "decode.json"
    command.bench(command.What.DECODE, file, None, rounds=2, only="tiny B2")
    value, text = json.loads(file.read_text()), capsys.readouterr().out
    (row,) = value["rows"]
    assert (row["case"], row["dtype"], row["unit"]) == ("tiny B2", "float32", "tokens/s")
    assert set(row["missing"]) == {"transformers generate", "transformers compiled loop"}
    assert all("no interpreter with torch" in reason for reason in row["missing"].values())
    assert row["share_of_limit"] == pytest.approx(row["ours"] / row["limit"])
    assert len(row["noise"]["ours"]["samples"]) == 2
    ours = value["peers"][TINY.name]["ours"]
    assert ours["first_call_seconds"] > 0
    parts = ("prefill", "token_early", "token_late")
    assert all(ours[f"milliseconds{which}"][part] > 0 for which in ("", "_with_room_for_40") for part in parts)
    # A whole answer is its parts: prefill and every later token.
    parted = ours["milliseconds"]["prefill"] + 5 * ours["milliseconds"]["token_early"]
    assert parted < 1e3 * TINY.batch * ANSWER / min(row["noise"]["ours"]["samples"])
    assert "MISSING" in text


def test_only_narrows_the_cases_down_and_a_wrong_name_says_which_there_are(capsys):
    assert [case.name for case in chosen(decode.CASES, "V256 B1 ")] == ["L6-D256-V256 B1 float32"]
    with pytest.raises(UsageError, match="llama-124m B1"):
        chosen(decode.CASES, "gemma")
    assert main(["bench", "decode", "--only", "gemma"]) == 2
    assert "--only" in capsys.readouterr().err
