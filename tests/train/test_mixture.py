"""A run on a mixture: as repeatable as one on a single corpus, scored corpus by corpus, its reading accounted for."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.base.errors import UsageError
from lm.data.corpus import prepare
from lm.data.tokens import TokenFile
from lm.train.config import RunConfig
from lm.train.identity import cell_id, identity_of
from lm.train.restore import load_run
from tests.train.tiny import before_step, corpus, rows, run_config, train_with

pytestmark = pytest.mark.slow  # compilations: about a second or more each

STEPS, BATCH, T = 20, 4, 16


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return {name: corpus(folder, seed=seed, documents=12 + 20 * seed) for seed, name in enumerate(("few", "many"))}


def config_of(texts, *weights: float) -> RunConfig:
    named = zip(texts.items(), weights, strict=True)
    mixture = [{"name": name, "corpus": str(text), "weight": weight} for (name, text), weight in named]
    return run_config("stdlib", f"data.mixture={json.dumps(mixture)}", f"steps={STEPS}", "eval_every=8")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, texts):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    loop.train(config_of(texts, 7, 3), run)
    return run


def test_killed_and_continued_it_writes_the_same_bits(tmp_path, monkeypatch, texts, unbroken):
    run, config = tmp_path / "run", config_of(texts, 7, 3)

    def kill():
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        train_with(monkeypatch, "put_batch", before_step(14, kill), config, run)
    with pytest.raises(UsageError, match=r"config\.data\.mixture: .*7\.0.* -> .*6\.0"):
        loop.train(config_of(texts, 6, 4), run)
    loop.train(config, run)
    assert "resumed after step 10" in (run / "log.txt").read_text()
    assert (run / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    one, other = (jax.device_get(load_run(path).params) for path in (run, unbroken))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_each_corpus_is_scored_and_the_whole_by_the_weights(unbroken):
    assert [(row["step"], row["set"]) for row in rows(unbroken, "eval")] == [
        (step, name) for step in (8, 16, 20) for name in ("validation", "few", "many")
    ]
    whole, few, many = rows(unbroken, "eval")[-3:]
    result = json.loads((unbroken / "result.json").read_text())
    assert result["loss"] == whole["loss"] == pytest.approx(0.7 * few["loss"] + 0.3 * many["loss"], rel=1e-12)
    assert whole["scored"] == few["scored"] + many["scored"]
    assert whole["loss_se"] == pytest.approx(math.hypot(0.7 * few["loss_se"], 0.3 * many["loss_se"]), rel=1e-12)
    # Bits over bytes, where a token of each corpus stands for as many bytes as it does there.
    per_token = [row["loss"] / math.log(2) / row["bits_per_byte"] for row in (few, many)]
    mean = whole["loss"] / math.log(2) / (0.7 * per_token[0] + 0.3 * per_token[1])
    assert whole["bits_per_byte"] == pytest.approx(mean, rel=1e-12)


def test_the_result_says_what_was_read_of_each_corpus(unbroken):
    result = json.loads((unbroken / "result.json").read_text())
    read = json.loads(result["mixture"])
    assert {name: entry["share"] for name, entry in read.items()} == {"few": 0.7, "many": 0.3}
    assert {name: entry["tokens"] for name, entry in read.items()} == {"few": 56 * T, "many": 24 * T}  # of 80 rows
    files = sorted(unbroken.glob("data/*/train.bin"), key=lambda path: path.stat().st_size)
    few, many = ((TokenFile.open(path).tokens - 1) // T for path in files)  # windows in an epoch
    assert {name: entry["epochs"] for name, entry in read.items()} == {"few": 56 / few, "many": 24 / many}
    assert read["few"]["epochs"] > 1 > read["many"]["epochs"]
    assert result["tokens_unique"] == few * T + 24 * T


def test_a_cell_is_named_by_texts_and_weights_and_by_no_path(tmp_path, texts):
    def named(config):
        return cell_id(config, identity_of(config, prepare(config.data, tmp_path / "cache")))

    moved = {name: shutil.copy(text, tmp_path / f"{name}.txt") for name, text in texts.items()}
    base = named(config_of(texts, 7, 3))
    assert named(config_of(moved, 0.7, 0.3)) == base
    assert named(config_of(moved, 3, 7)) != base
