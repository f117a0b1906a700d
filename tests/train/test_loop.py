"""What a whole run leaves behind, with every option that changes how it runs."""

import json
import struct

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.cli import main
from lm.scaling.table import NAMES
from lm.train.restore import load_run
from tests.train.tiny import before_step, config_file, corpus, rows, run_config, train_with


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, text):
    run = tmp_path_factory.mktemp("plain") / "run"
    loop.train(run_config(text), run)
    return run


def scalars(run) -> list[tuple[str, int, float]]:
    """Every scalar event of a run, oldest file first, less what a restart has taken back."""
    from tensorboardX.proto import event_pb2

    found: list[tuple[str, int, float]] = []
    for path in sorted((run / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                found = [entry for entry in found if entry[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


@pytest.mark.slow
def test_a_result_is_a_whole_row_and_its_numbers_are_those_of_the_run(plain):
    row = json.loads((plain / "result.json").read_text())
    assert list(row) == list(NAMES)
    last_train, last_eval = rows(plain, "train")[-1], rows(plain, "eval")[-1]
    assert row["loss"] == last_eval["loss"]
    assert row["train_loss"] == last_train["loss"]  # the one interval that ends in the last tenth
    assert row["tokens"] == last_train["tokens"] == 12 * 64
    assert row["mfu"] == pytest.approx(row["flops_matmul"] / row["tokens"] * row["tokens_per_second"]
                                       / (row["peak_flops"] * jax.device_count()))  # fmt: skip


def test_the_log_and_the_terminal_say_how_it_began(tmp_path, text, capsys):
    loop.train(run_config(text), tmp_path / "run")
    assert capsys.readouterr().err == "fresh start\n"
    assert (tmp_path / "run" / "log.txt").read_text().endswith("INFO fresh start\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("model.remat=full",),
        ("model.remat=dots", "model.unroll_layers=true", "model.n_layer=2"),
        ("accumulate=2",),
    ],
)
def test_how_a_step_is_computed_changes_no_loss_beyond_rounding(tmp_path, text, plain, changes):
    if "model.n_layer=2" in changes:
        loop.train(run_config(text, "model.n_layer=2"), tmp_path / "plain")
        plain = tmp_path / "plain"
    loop.train(run_config(text, *changes), tmp_path / "run")
    for ours, theirs in zip(rows(tmp_path / "run"), rows(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)  # float32, twelve steps of Adam


@pytest.mark.slow
def test_bfloat16_keeps_parameters_in_float32_and_trains(tmp_path, text, plain):
    loop.train(run_config(text, "model.dtype=bfloat16"), tmp_path / "run")
    assert {leaf.dtype for leaf in jax.tree.leaves(load_run(tmp_path / "run").params)} == {np.dtype("float32")}
    ours, theirs = (rows(run, "train")[-1]["loss"] for run in (tmp_path / "run", plain))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.03)  # 8 bits of mantissa


@pytest.mark.slow
def test_documents_may_be_masked_and_further_sets_scored(tmp_path, text):
    further = corpus(tmp_path, seed=5)
    extra = "data.extra_validation=" + json.dumps({"further": further})
    loop.train(run_config(text, "data.segment_mask=true", "eval_every=6", extra), tmp_path / "run")
    assert [(row["step"], row["set"]) for row in rows(tmp_path / "run", "eval")] == [
        (6, "validation"), (6, "further"), (12, "validation"), (12, "further")]  # fmt: skip
    tags = {tag for tag, _, _ in scalars(tmp_path / "run")}
    assert {"loss", "lr", "grad_norm", "validation/loss", "further/bits_per_byte"} <= tags


@pytest.mark.slow
def test_events_are_the_rows_and_a_resumed_run_shows_each_once(tmp_path, text, monkeypatch):
    run, config = tmp_path / "run", run_config(text)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", before_step(8, stop), config, run)
    loop.train(config, run)
    losses = [(step, value) for tag, step, value in scalars(run) if tag == "loss"]
    assert losses == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows(run, "train")]


@pytest.mark.slow
def test_a_profile_is_written_and_changes_nothing(tmp_path, text, plain):
    path, run = config_file(tmp_path, text), tmp_path / "run"
    assert main(["train", "--config", str(path), "--workdir", str(run), "--profile", "2:3"]) == 0
    assert [path.stat().st_size > 0 for path in run.rglob("*.xplane.pb")] == [True]
    assert (run / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_earlier_checkpoints(tmp_path, text, capsys):
    path, run = config_file(tmp_path, text), tmp_path / "run"
    wild = ["--config.optimizer.peak_lr=1e30", "--config.optimizer.warmup_steps=100", "--config.checkpoint_every=1"]
    command = ["train", "--config", str(path), "--workdir", str(run), *wild]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "metrics.jsonl: " in said.splitlines()[-1]
    last = rows(run)[-1]
    assert "nan" in last.values() or "inf" in last.values()
    saved = [int(path.name) for path in (run / "checkpoints").iterdir()]
    assert all(step < last["step"] for step in saved)
    for leaf in jax.tree.leaves(load_run(run).params) if saved else []:
        assert np.isfinite(leaf).all()
    before = (run / "metrics.jsonl").read_bytes()
    assert main(command) == 1
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "result.json").exists()


@pytest.mark.slow
def test_a_bad_initialisation_is_warned_of_and_a_good_one_is_not(tmp_path, text, capsys, plain):
    assert "WARNING" not in (plain / "log.txt").read_text()
    bad = run_config(text, "model.tied_embedding=false", "model.init_std=0.4", "steps=2")
    loop.train(bad, tmp_path / "run")
    assert "WARNING the first loss is" in (tmp_path / "run" / "log.txt").read_text()
    assert "the first loss is" in capsys.readouterr().err
