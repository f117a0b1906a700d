"""`lm bench train`: peers compute our function, rows keep the contract, a missing peer is named."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lm.bench import command, limits, machine, train
from lm.bench.peer import find_python, running, save_start
from lm.bench.train import Shape, disagreement, our_step, peers_of
from lm.cli import main
from lm.model.config import Dtype
from lm.parallel.mesh import make_mesh
from lm.train.step import fresh_state

TINY = Shape(layers=2, width=16, heads=2, length=12, batch=3, vocabulary=40, steps=1)
# One float32 forward and backward pass in another order of sums: some 1e-6 of the value, and a tenfold and more margin.
SAME = 1e-4


@pytest.mark.slow
def test_nanogpt_computes_our_function(tmp_path):
    torch_python = find_python(os.environ.get("LM_PEER_PYTHON"), "torch")
    if torch_python[0] is None:
        pytest.skip(torch_python[1])
    config, start = TINY.run_config(Dtype.FLOAT32), tmp_path / "start.npz"
    tokens_BW = np.random.default_rng(1).integers(TINY.vocabulary, size=(TINY.batch, TINY.length + 1), dtype=np.int32)
    params = fresh_state(config, make_mesh(config.mesh))["params"]
    save_start(start, params, inputs=tokens_BW[:, :-1], targets=tokens_BW[:, 1:])
    _, ours = our_step(config, tokens_BW)
    (peer,) = [peer for peer in peers_of(TINY, torch_python, start) if peer.name == "nanoGPT eager float32"]
    with running(peer) as started:
        facts = started.ready()
        assert facts["loss"] == pytest.approx(ours["loss"], abs=SAME)
        assert facts["grad_norm"] == pytest.approx(ours["grad_norm"], rel=SAME)


def test_another_function_is_refused_and_nan_is_another():
    ours = {"loss": 5.5, "grad_norm": 2.0}
    assert disagreement({"loss": 5.5001, "grad_norm": 2.0001}, ours, 1e-3) == ""
    assert "loss" in disagreement({"loss": 5.6, "grad_norm": 2.0}, ours, 1e-3)
    assert "grad_norm" in disagreement({"loss": 5.5, "grad_norm": 2.1}, ours, 1e-3)
    assert disagreement({"loss": float("nan"), "grad_norm": 2.0}, ours, 1e-3)


@pytest.mark.slow
def test_rows_for_both_types_with_nanodo_computing_our_function_and_pytorch_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "find_python", lambda asked, module: (None, f"no interpreter with {module}"))
    monkeypatch.setattr(limits, "MATMUL_SIDES", (32, 48))
    real = train.bench_train
    monkeypatch.setattr(train, "bench_train", lambda python, rounds, meter, _: real(python, rounds, meter, [TINY]))
    file = tmp_path / "train.json"
    command.bench(command.What.TRAIN, file, None, rounds=2)
    value, text = json.loads(file.read_text()), capsys.readouterr().out
    assert [row["dtype"] for row in value["rows"]] == ["float32", "bfloat16"]
    for row in value["rows"]:
        assert row["case"] == TINY.name
        assert row["unit"] == "tokens/s"
        assert all("no interpreter with torch" in reason for reason in row["missing"].values())
        assert set(row["missing"]) >= {f"nanoGPT {how} {row['dtype']}" for how in ("eager", "compiled")}
        assert f"nanodo {row['dtype']}" in row["peers"]
        assert row["ratio_to_best_peer"] == pytest.approx(row["ours"] / max(row["peers"].values()))
        assert row["share_of_limit"] == pytest.approx(row["ours"] / row["limit"])
        assert len(row["noise"]["ours"]["samples"]) == 2
    said = value["peers"][TINY.name]
    for name in ("loss", "grad_norm"):
        assert said["nanodo float32"][name] == pytest.approx(said["ours"]["float32"][name], rel=SAME)
    assert {"machine", "jax", "load_before", "load_after", "foreign_cores", "commit"} <= set(value["machine"])
    assert "MISSING" in text
    assert "no interpreter with torch" in text


def test_what_is_wrong_with_the_request_is_one_line(tmp_path, capsys):
    assert main(["bench", "train", "--rounds", "0"]) == 2
    assert main(["bench", "train", "--json", str(tmp_path / "nowhere" / "x.json")]) == 2
    assert main(["bench", "train", "--peer-python", str(tmp_path / "no-python")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_the_meter_reads_our_own_work_from_the_system():
    if not Path("/proc/self/stat").exists():
        pytest.skip(f"{sys.platform} has no /proc")
    system, own = machine._own_seconds([os.getpid()]), time.process_time()
    sum(i * i for i in range(3_000_000))
    worked = time.process_time() - own
    assert worked > 0
    # The system counts in ticks of 10 ms, user and system time apart.
    assert machine._own_seconds([os.getpid()]) - system == pytest.approx(worked, abs=0.05)
