"""A run with an encoder, from its first loss to its answers: what bears loss is counted apart from what is read."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.meshes.eight import ROOT, eight_devices
from lm.cli import main
from lm.parallel.mesh import make_mesh
from lm.parallel.rules import put_batch
from lm.scaling.table import NAMES
from lm.train.loss import loss_sums
from lm.train.step import fresh_state, loss_gradients, make_train_step
from tests.train.tiny import config_file, corpus, rows, run_config

S, T = 8, 16
OVERRIDES = ("model.encoder.n_layer=1", f"model.encoder.source_length={S}")
FLAGS = [f"--config.{override}" for override in OVERRIDES]
CONFIG = run_config("unused", *OVERRIDES)
ROWS, PREDICTED = CONFIG.batch_size, T - S + 1


def batch_of(seed: int) -> dict[str, np.ndarray]:
    tokens_BW = np.random.default_rng(seed).integers(0, 257, (ROWS, T + 1), dtype=np.int32)
    return {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": np.ones((ROWS, T), np.float32)}


def test_only_what_follows_the_source_bears_loss():
    assert CONFIG.tokens_per_step == ROWS * PREDICTED
    batch = batch_of(0)
    batch["weights"][0, -2:] = 0
    logits_BTV = jax.random.normal(jax.random.key(0), (ROWS, PREDICTED, 257))
    _, sums = loss_sums(logits_BTV, batch, 0.0)
    assert sums["tokens"] == ROWS * PREDICTED - 2
    nats_BT = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits_BTV)), batch["targets"][:, S - 1 :, None], 2)
    kept_BT = batch["weights"][:, S - 1 :] * nats_BT[..., 0]
    np.testing.assert_allclose(sums["nll"], kept_BT.sum(), rtol=1e-5)  # float32 sums of 34 terms of order 6


@pytest.mark.slow
def test_targets_within_the_source_change_no_gradient():
    batch, params = batch_of(0), fresh_state(CONFIG, make_mesh(CONFIG.mesh))["params"]
    gradients = jax.jit(loss_gradients(CONFIG))
    expected, _ = gradients(params, batch)
    targets_BT = batch["targets"].copy()
    targets_BT[:, : S - 1] = 0
    found, _ = gradients(params, {**batch, "targets": targets_BT})
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(expected))  # encoder and cross-attention learn too


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    file = config_file(folder, corpus(folder), steps=24)
    assert main(["train", "--config", str(file), "--workdir", str(folder / "run"), *FLAGS]) == 0
    return folder


@pytest.mark.slow
def test_a_run_learns_and_says_what_bore_loss_and_what_was_processed(run, capsys):
    result = json.loads((run / "run" / "result.json").read_text())
    assert list(result) == list(NAMES)
    train = rows(run / "run", "train")
    assert train[-1]["loss"] < train[0]["loss"] - 0.5  # nats/token, of about 5.6
    assert result["tokens"] == train[-1]["tokens"] == 24 * ROWS * PREDICTED
    assert result["tokens_processed"] == 24 * ROWS * (T + 1)
    [scored] = [row["scored"] for row in rows(run / "run", "eval")]
    assert scored == 64 // PREDICTED * PREDICTED
    capsys.readouterr()
    assert main(["count", "--config", str(run / "run" / "config.json"), "--check", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert (counted["tokens"], counted["tokens_processed"]) == (result["tokens"], result["tokens_processed"])
    assert counted["traced_flops_per_token"] == counted["flops_per_token"]["flops_matmul_full"]
    assert counted["run_flops"]["flops_matmul"] == result["flops_matmul"]


@pytest.mark.slow
def test_a_run_is_evaluated_and_answers(run, capsys):
    text = run / "text.txt"
    text.write_text("abc defg hab " * 3)
    for window in (T, T + 4):
        capsys.readouterr()
        command = ["eval", "--checkpoint", str(run / "run"), "--text", str(text), "--window", str(window), "--json"]
        assert main(command) == 0
        score = json.loads(capsys.readouterr().out)
        assert (score["tokens"], score["window"], score["stride"]) == (40, window, window - S + 1)
        assert 0 < score["nats_per_token"] < 6
    assert main(["eval", "--checkpoint", str(run / "run"), "--text", str(text), "--window", str(S - 1)]) == 2
    assert "7 is shorter than the encoder's source_length of 8" in capsys.readouterr().err
    asked = ["generate", "--checkpoint", str(run / "run"), "--prompt", "abc defg habc", "--temperature", "0", "--json"]
    assert main([*asked, "--max-tokens", "5", "--ignore-end"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5


@pytest.mark.slow
def test_other_shapes_are_refused(run, capsys):
    config = ["--config", str(run / "config.json")]
    changed = [*FLAGS, "--config.model.encoder.source_length=4"]
    assert main(["train", *config, "--workdir", str(run / "run"), *changed]) == 2
    assert "encoder.source_length: 8 -> 4" in capsys.readouterr().err
    assert main(["train", *config, "--workdir", str(run / "other"), "--init-from", str(run / "run")]) == 2
    assert "its parameters have other shapes than this model's: params.encoder" in capsys.readouterr().err
    assert main(["compile", *config, *FLAGS, "--topology", "v5e:2x2"]) == 2
    assert "encoder is given" in capsys.readouterr().err
    assert main(["export", str(run / "run"), "--out", str(run / "out")]) == 2
    assert "model.encoder" in capsys.readouterr().err


def on_a_mesh(**axes: int) -> dict[str, float]:
    """The metrics of the second step, on so many devices."""
    changes = [f"mesh.{axis}={size}" for axis, size in axes.items()]
    config = run_config("unused", *OVERRIDES, "model.vocab_size=258", *changes)
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh), fresh_state(config, mesh)
    for seed in range(2):
        state, metrics = step(state, put_batch(batch_of(seed), mesh), np.float32(0.01))
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.full
def test_eight_devices_train_the_same_model():
    made = subprocess.run([sys.executable, "-m", __name__], env=eight_devices(), cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "rematerialization" not in made.stderr
    one = on_a_mesh(data=1)
    for metrics in map(json.loads, made.stdout.splitlines()):
        assert metrics == pytest.approx(one, rel=1e-4)  # the same float32 sums in another order, through two steps


if __name__ == "__main__":
    for axes in ({"fsdp": 2, "tensor": 2, "data": 2}, {"fsdp": 4, "tensor": 2, "data": 1}):
        print(json.dumps(on_a_mesh(**axes)))
