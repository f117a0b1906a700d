"""`lm tokenize` as a user meets it."""

import json
from pathlib import Path

import pytest

from lm.cli import main


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"text number {n}"}) + "\n" for n in range(100)))
    return str(path)


def test_it_says_what_it_wrote(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tokens"
    command = ["tokenize", text, "--out", str(out), "--train-bpe", "260", "--validation-fraction", "0.2"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "tokenizer.json: 260 entries, fingerprint" in said
    assert f"{out / 'train.bin'}: " in said
    assert f"{out / 'validation.bin'}: " in said
    for word in ("tokens", "bytes/token", "documents", "fingerprint"):
        assert said.count(word) >= 2
    assert main(command) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.txt"], "no such file or folder"),
        (["stdlib", "--separator", "x"], "a separator splits .txt files"),
        (["stdlib", "--tokenizer", "absent.json"], "no such tokenizer"),
        (["stdlib", "--tokenizer", "t.json", "--train-bpe", "300"], "Pass one of the two"),
        (["stdlib", "--train-bpe", "0"], "at least 257"),
        (["stdlib", "--validation-fraction", "1"], "from 0 to below 1"),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokens"
    assert main(["tokenize", *arguments, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()
