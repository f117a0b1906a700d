"""An imported run is read like one that was trained here: answers, scores, compression, and a start for training."""

import json
import math

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.base.config import build
from lm.base.errors import UsageError
from lm.cli import main
from lm.data.tokenizer import ByteTokenizer
from lm.interop.exporting import export_model
from lm.interop.importing import import_model
from lm.run.restore import load_model
from lm.train.config import RunConfig
from tests.interop.runs import LLAMA, make_run
from tests.model import variants
from tests.train.tiny import BASE, corpus

pytestmark = pytest.mark.slow  # compilations: about a second or more each

SHAPE = variants.replace(LLAMA, context_length=16, n_layer=1, vocab_size=260)
BEGIN, END = 257, 256


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Imported; its documents begin with a token of their own."""
    folder = tmp_path_factory.mktemp("used")
    made = make_run(folder / "made", SHAPE)
    export_model(made, folder / "out")
    tokenizer = json.loads(ByteTokenizer().to_json())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": BEGIN, "content": "<begin>"})
    (folder / "out" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "out" / "config.json").read_text())
    (folder / "out" / "config.json").write_text(json.dumps({**config, "bos_token_id": BEGIN}))
    import_model(folder / "out", folder / "run")
    return folder / "run"


def log_probs(ids):
    """Of each token but the first, by the model's own forward pass."""
    tokens_BT = np.array([ids], np.int32)
    logits_TV = np.asarray(variants.logits(SHAPE, variants.parameters(SHAPE), tokens_BT))[0].astype(np.float64)
    logits_TV -= np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))
    return logits_TV[np.arange(len(ids) - 1), ids[1:]]


def test_generate_begins_a_document(run, capsys):
    assert main(["generate", "--checkpoint", str(run), "--prompt", "ab", "--max-tokens", "3", "--ignore-end",
                 "--temperature", "0", "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    whole = [BEGIN, *b"ab", *found["tokens"]]
    assert found["log_probs"] == pytest.approx(log_probs(whole)[2:].tolist(), abs=1e-4)  # float32, other products


def test_eval_scores_all_but_the_beginnings(run, capsys):
    text = run.parent / "text.txt"
    text.write_text("abc\n\nxy")
    per_token = run.parent / "tokens.jsonl"
    assert main(["eval", "--checkpoint", str(run), "--text", str(text), "--separator", "\\n\\n", "--per-token",
                 str(per_token), "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    whole = [BEGIN, *b"abc", END, BEGIN, *b"xy", END]
    wanted = np.delete(log_probs(whole), 4)
    rows = [json.loads(line) for line in per_token.read_text().splitlines()]
    assert [row["token"] for row in rows] == [*b"abc", END, *b"xy", END]
    assert [row["log_prob"] for row in rows] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert (found["tokens"], found["bytes"], found["documents"]) == (7, 5, 2)
    assert found["bits_per_byte"] == pytest.approx(-wanted.sum() / math.log(2) / 5, abs=1e-4)
    assert "the token that begins each" in found["bos"]


@pytest.mark.full
def test_compress_and_back(run, tmp_path):
    (tmp_path / "text").write_bytes(b"abcabc \xff")
    assert main(["compress", str(tmp_path / "text"), "--checkpoint", str(run)]) == 0
    assert main(["decompress", str(tmp_path / "text.lmz"), "--checkpoint", str(run), "--out", str(tmp_path / "t")]) == 0
    assert (tmp_path / "t").read_bytes() == b"abcabc \xff"


@pytest.mark.full
def test_training_starts_from_it(run, tmp_path):
    recorded = json.loads((run / "config.json").read_text())["config"]
    spec = recorded["data"]["tokenizer"].replace("tokenizer.json", str(run / "tokenizer.json"))
    data = {**BASE["data"], "corpus": corpus(tmp_path), "tokenizer": spec}
    still = {"peak_lr": 0.0, "warmup_steps": 0}  # what it ends with is what it began with
    values = {**BASE, "model": recorded["model"], "data": data, "optimizer": still, "steps": 1, "init_from": str(run)}
    row = loop.train(build(RunConfig, values), tmp_path / "tuned")
    assert math.isfinite(row["loss"])
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "tuned").params, load_model(run).params)
    assert "init_from" in json.loads((tmp_path / "tuned" / "config.json").read_text())["identity"]
    with pytest.raises(UsageError, match="its tokenizer is another one"):
        loop.train(build(RunConfig, {**values, "data": BASE["data"] | {"corpus": data["corpus"]}}), tmp_path / "other")
