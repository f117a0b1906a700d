"""A counting run from the command line: what it counts, what it leaves in its folder, and what reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lm.base.config import load_file
from lm.base.errors import RunError, UsageError
from lm.cli import main
from lm.data.batches import Batches
from lm.data.corpus import prepare
from lm.run.restore import load
from lm.scaling.table import NAMES
from lm.train.config import CountingRun, build_run
from lm.train.counting import count_run
from lm.train.loop import train
from tests.train.tiny import BASE, corpus, rows, run_config

ORDER = 3


def counting_values(text: str, **changes) -> dict:
    model = {"vocab_size": 257, "context_length": 16, "order": ORDER}
    return {
        "model": {**model, **changes.pop("model", {})},
        "data": {**BASE["data"], "corpus": text},
        **{name: BASE[name] for name in ("steps", "batch_size")},
        "eval_tokens": 100_000,  # all whole windows
        **changes,
    }


def config_of(text: str, **changes) -> CountingRun:
    config = build_run(counting_values(text, **changes))
    assert isinstance(config, CountingRun)
    return config


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return corpus(tmp_path_factory.mktemp("text"), documents=60)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(counting_values(text)))
    assert main(["train", "--config", str(folder / "config.json"), "--workdir", str(folder / "run")]) == 0
    return folder / "run"


def test_the_row_has_every_column_and_says_what_was_seen(run):
    row = json.loads((run / "result.json").read_bytes())
    assert list(row) == list(NAMES)
    assert row["tokens"] == 12 * 4 * 16
    assert row["params_total"] == row["params_matrices"] == load(run).params.stored
    assert row["params_active"] == ORDER
    assert row["flops_matmul"] == row["flops_6nd"] == row["mfu"] == 0
    [train] = rows(run, "train")
    [evaluated] = rows(run, "eval")
    assert (train["loss"], evaluated["loss"]) == (row["train_loss"], row["loss"])
    assert row["train_loss"] < row["loss"]


def test_what_is_counted_are_the_tokens_of_the_batches_of_training(run, text, tmp_path):
    config = config_of(text)
    batches = Batches(prepare(config.data, tmp_path).parts, 16, 4, 0)
    targets = np.concatenate([batches[step]["targets"] for step in range(12)])
    assert targets.size < (batches.windows[0] - 1) * 16  # a part of an epoch
    _, once = load(run).params.tables[-1]
    assert once.sum() == 12 * 4 * (16 - ORDER + 2)  # a window has so many whole n-grams
    unigram = count_run(config_of(text, model={"order": 1}), tmp_path / "unigram")
    counted = load(tmp_path / "unigram").params.tables[0][1]
    np.testing.assert_array_equal(counted, np.bincount(targets.ravel(), minlength=257))
    assert unigram["tokens"] == targets.size


def test_a_mixture_is_counted_as_it_is_dealt(tmp_path):
    texts = [corpus(tmp_path, documents=60, seed=seed) for seed in (1, 2)]
    mixture = [{"name": f"part{i}", "corpus": text, "weight": 1 + 2 * i} for i, text in enumerate(texts)]
    values = counting_values("stdlib", model={"order": 1})
    config = build_run({**values, "data": {**values["data"], "mixture": mixture}})
    assert isinstance(config, CountingRun)
    count_run(config, tmp_path / "run", cache=tmp_path / "cache")
    batches = Batches(prepare(config.data, tmp_path / "cache").parts, 16, 4, 0)
    targets = np.concatenate([batches[step]["targets"].ravel() for step in range(12)])
    np.testing.assert_array_equal(load(tmp_path / "run").params.tables[0][1], np.bincount(targets, minlength=257))


def test_what_is_read_again_in_another_epoch_is_counted_once(text, tmp_path):
    for name, steps in (("one", 60), ("two", 120)):
        row = count_run(config_of(text, steps=steps), tmp_path / name)
        assert row["tokens"] > row["tokens_unique"]
    one, two = (load(tmp_path / name).params.tables for name in ("one", "two"))
    for first, second in zip(one, two, strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_same_run_again_has_the_same_bytes_and_a_finished_one_is_left_alone(run, text, tmp_path):
    count_run(config_of(text), tmp_path / "again")
    for name in ("metrics.jsonl", "checkpoints/12/counts.npz"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()
    before = (run / "result.json").read_bytes()
    assert count_run(config_of(text), run) == json.loads(before)
    assert (run / "result.json").read_bytes() == before


def test_lm_eval_gives_the_loss_that_the_run_gave(run, tmp_path, capsys):
    tokens = np.fromfile(next((run / "data").glob("*/validation.bin")), np.uint16)
    pieces = bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode().split("\0")
    (tmp_path / "held.txt").write_text("\n\n".join(piece for piece in pieces if piece))
    asked = ["eval", "--checkpoint", str(run), "--text", str(tmp_path / "held.txt"), "--separator", "\\n\\n"]
    per_token = tmp_path / "tokens.jsonl"
    assert main([*asked, "--per-token", str(per_token)]) == 0
    assert "perplexity" in capsys.readouterr().out
    losses = [-json.loads(line)["log_prob"] for line in per_token.read_text().splitlines()]
    [evaluated] = rows(run, "eval")
    # The run scores whole windows only, so that the last few tokens may be missing there.
    assert np.mean(losses[: evaluated["scored"]]) == pytest.approx(evaluated["loss"], abs=1e-12)


@pytest.mark.slow
def test_greedy_answers_take_the_likeliest_token_and_samples_depend_on_the_seed_alone(run, capsys):
    def answers(*arguments: str) -> list[dict]:
        capsys.readouterr()
        asked = ("--prompt", "ab", "--max-tokens", "8", "--ignore-end", "--json")
        assert main(["generate", "--checkpoint", str(run), *asked, *arguments]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    [greedy] = answers("--temperature", "0")
    counts, context = load(run).params, [256, *b"ab"]
    for token, log_prob in zip(greedy["tokens"], greedy["log_probs"], strict=True):
        prob_V = counts.distribution(context)
        assert token == np.argmax(prob_V)
        assert log_prob == pytest.approx(np.log(prob_V[token]), abs=1e-5)  # float32
        context.append(token)
    assert len(greedy["tokens"]) == 8
    together = answers("--n", "2", "--seed", "5")
    assert [answer["tokens"] for answer in answers("--n", "2", "--seed", "5")] == [a["tokens"] for a in together]
    assert together[0]["tokens"] != together[1]["tokens"]
    [stopped] = answers("--temperature", "0", "--stop", bytes(greedy["tokens"][:3]).decode()[1:])
    assert stopped["finish"] == "stop"
    assert stopped["tokens"] == greedy["tokens"][:3]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "--prompt", "a", "--beams", "2"], "--beams"),
        (["generate", "--prompt", "a", "--regex", "a"], "--regex"),
        (["generate", "--prompt", "a", "--cache", "int8"], "--cache"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["compress", "FILE"], "holds counts of n-grams"),
    ],
)
def test_what_counts_cannot_do_is_refused_by_name(run, text, capsys, command, said):
    command = [text if part == "FILE" else part for part in command]
    assert main([*command, "--checkpoint", str(run)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.splitlines()[-1].startswith("lm ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile", "1:2"], "--profile"),
        (["--wandb"], "--wandb"),
        (["--init-from", "elsewhere"], "'init_from'"),
        (["--config.optimizer.peak_lr=1"], "'optimizer'"),
    ],
)
def test_flags_of_training_are_refused_by_name(text, tmp_path, capsys, flags, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(counting_values(text)))
    assert main(["train", "--config", str(path), "--workdir", str(tmp_path / "run"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_lm_count_answers_for_counts_and_refuses_a_trace(text, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(counting_values(text)))
    assert main(["count", "--config", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["parameters"]["active"], found["run_flops"]["flops_matmul"]) == (768, ORDER, 0)
    assert main(["count", "--config", str(path), "--check"]) == 2
    assert "--check" in capsys.readouterr().err


def test_another_kind_of_run_in_the_folder_is_refused_with_what_differs(run, text):
    with pytest.raises(UsageError, match=r"config.model.order: 3 -> 2"):
        count_run(config_of(text, model={"order": 2}), run)
    with pytest.raises(UsageError, match=r"config.model.order: 3 -> None"):
        train(run_config(text), run)


def test_a_token_of_probability_0_is_one_line(text, tmp_path):
    with pytest.raises(RunError, match="pseudocount"):
        count_run(config_of(text, model={"pseudocount": 0.0}, steps=1, batch_size=1), tmp_path)


def test_damaged_counts_are_not_used(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/checkpoints/12/counts.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"counts are damaged: counts.npz has changed"):
        load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UsageError, match="there are no counts"):
        load(tmp_path / "run")


def test_a_run_that_is_stopped_as_it_counts_leaves_nothing_and_counts_again(run, text, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lm.run.integrity.seal", stopped)
        with pytest.raises(KeyboardInterrupt):
            count_run(config_of(text), tmp_path / "run")
    assert not list((tmp_path / "run/checkpoints").iterdir())
    (tmp_path / "run/checkpoints/.12.killed.part").mkdir()  # what SIGKILL would have left
    count_run(config_of(text), tmp_path / "run")
    assert [child.name for child in (tmp_path / "run/checkpoints").iterdir()] == ["12"]
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["uniform", "unigram", "bigram", "ngram"])
def test_the_config_file_has_the_models_of_its_text(name):
    config = build_run(load_file(f"configs/counting.py:{name}"))
    assert isinstance(config, CountingRun)
    assert config.model.order == {"uniform": 0, "unigram": 1, "bigram": 2, "ngram": 5}[name]


def test_a_model_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match="no counting model 'trigram'"):
        load_file("configs/counting.py:trigram")
