"""Eight virtual devices of the CPU in a process of their own: the mesh changes where numbers lie, not what they are."""

import functools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from experiments.meshes.eight import (
    CASES,
    HEAD,
    KV_HEADS,
    LAYERS,
    LENGTH,
    RECURRENT,
    ROOT,
    ROUTED,
    ROWS,
    VOCABULARY,
    WIDTH,
    eight_devices,
    measured,
)
from lm.parallel.collectives import Kind
from tests.train.tiny import config_file, corpus

SLOW = ("data", "fsdp", "sequence", "tensor", "data-fsdp-tensor", "fsdp-sequence", "expert-sequence-tensor")
FULL = tuple(name for name in CASES if name not in SLOW)
TOGETHER = (*SLOW, *RECURRENT)
one_axis = pytest.mark.parametrize("name", ["data", "fsdp", "sequence", "tensor"])
every_case = pytest.mark.parametrize("name", [*SLOW, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])

FLOAT = 4  # bytes
WARNING = "Involuntary full rematerialization"  # XLA's, where it can go from one sharding to another by no other way
ACTIVATION = ROWS * LENGTH * WIDTH * FLOAT
SUMS = {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER}  # the compiler for CPU never writes the second
KINDS = {
    "replica": SUMS,
    "data": SUMS,
    "expert": SUMS,
    "fsdp": SUMS | {Kind.ALL_GATHER, Kind.ALL_TO_ALL},  # the lookup in a table cut along D turns rows into widths
    "sequence": SUMS | {Kind.ALL_GATHER},
    "tensor": SUMS,
}

pytestmark = pytest.mark.slow


def on_eight_devices(*command):
    return subprocess.run([sys.executable, "-m", *command], env=eight_devices(), cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip


def train_on_eight_devices(config, run):
    return on_eight_devices("lm.cli", "train", "--config", str(config), "--workdir", str(run))


@functools.cache
def run(cases):
    return measured(cases)


def results(name):
    return run(FULL if name in FULL else TOGETHER)


def collectives(name, *kinds, over=None):
    found = results(name)[name]["collectives"]
    return [one for one in found if one["kind"] in (kinds or tuple(Kind)) and (over is None or over in one["axes"])]


def total(found):
    return sum(one["bytes"] * one["count"] for one in found)


@every_case
def test_every_mesh_gives_the_losses_and_norms_of_one_device(name):
    found = results(name)
    # float32 sums of some thousand terms in another order: about 1e-7 x sqrt(1000), and three steps to grow in.
    np.testing.assert_allclose(found[name]["rows"], found[CASES[name].model]["rows"], rtol=2e-5)


@one_axis
def test_each_axis_sends_what_it_should_and_nothing_else(name):
    axes = CASES[name].axes
    for one in collectives(name):
        assert set(one["axes"]) <= set(axes), one
        assert all(one["kind"] in KINDS[axis] for axis in one["axes"]), one
    assert {axis for one in collectives(name) for axis in one["axes"]} == set(axes)


@one_axis
def test_logits_are_never_sent(name):
    parts = "|".join(str(VOCABULARY // parts) for parts in (1, 2, 4, 8))
    assert not [one for one in collectives(name) if re.search(rf"\[\d+,\d+,({parts})\]", one["shape"])]


@every_case
def test_xla_never_gathers_a_whole_array_for_want_of_a_better_way(name):
    assert WARNING not in results(name)[name]["said"]


def test_xla_finds_a_way_for_the_lookup_on_every_mesh():
    done = on_eight_devices("tests.parallel.lookups")
    assert (done.returncode, done.stdout) == (0, f"{len(CASES)}\n"), done.stderr[-3000:]
    assert WARNING not in done.stderr


@pytest.mark.parametrize(
    "name", ["data", *(pytest.param(name, marks=pytest.mark.full) for name in ("replica", "expert"))]
)
def test_rows_cost_one_sum_of_the_gradients(name):
    # A tied table has two gradients, of lookup and head, that XLA sums apart; the loss and the tokens are two numbers.
    gradients = (results(name)[name]["parameters"] + VOCABULARY * WIDTH) * FLOAT
    assert total(collectives(name)) == gradients + 2 * FLOAT


def test_fsdp_gathers_each_parameter_forward_and_backward_and_sums_each_gradient():
    parameters = results("fsdp")["fsdp"]["parameters"] * FLOAT
    gathered, summed = total(collectives("fsdp", Kind.ALL_GATHER)), total(collectives("fsdp", *SUMS))
    tokens = ROWS * LENGTH * FLOAT
    # The head is gathered once, and of a tied table that is all; norms are whole on every device.
    table = VOCABULARY * WIDTH * FLOAT
    assert 2 * (parameters - table) * 0.98 + table <= gathered <= 2 * parameters + tokens
    assert parameters * 0.98 <= summed <= (parameters + table) * 1.02
    # Activations stay: all that is turned round is the lookup's result, on its way there and back.
    assert total(collectives("fsdp", Kind.ALL_TO_ALL)) <= 2 * ACTIVATION / 8


def test_tensor_sums_activations_where_the_cut_products_end():
    # Forward: attention's and the feed-forward layer's output, and the lookup. Backward: what goes into queries, keys,
    # values, gate and up, and into the head. The rest are [B, T] sums of the loss and the norm of the gradients.
    found = total(collectives("tensor"))
    assert (7 * LAYERS + 2) * ACTIVATION <= found <= (7 * LAYERS + 3) * ACTIVATION


def test_sequence_gathers_keys_and_values_and_nothing_else():
    found = collectives("sequence", Kind.ALL_GATHER)
    one_of_them = ROWS * LENGTH * KV_HEADS * HEAD * FLOAT
    assert {one["bytes"] for one in found} <= {one_of_them, 2 * one_of_them}  # two may travel together
    assert total(found) == 2 * LAYERS * one_of_them


@every_case
def test_parameters_and_moments_are_cut_over_fsdp_and_tensor_alone(name):
    found, axes = results(name), CASES[name].axes
    share = found[name]["state_bytes"] / found[CASES[name].model]["state_bytes"]
    cut = axes.get("fsdp", 1) * axes.get("tensor", 1)
    # Whole on every device: scales and, over tensor, the biases of what writes to the residual stream and the batch.
    assert 0.95 / cut <= share <= 1.25 / cut


@every_case
def test_activations_are_cut_over_every_axis(name):
    found, axes = results(name), CASES[name].axes
    share = found[name]["temporary_bytes"] / found[CASES[name].model]["temporary_bytes"] * math.prod(axes.values())
    # Whole are gradients before they are summed, and keys and values over sequence (a tenth and a third of what remains
    # at these sizes); over tensor the residual stream and the norms, which are as much as all that is cut.
    assert share <= (2.5 if "tensor" in axes else 1.5)


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_cut_in_rows_and_over_tensor_and_change_no_number(name):
    found = results(name)
    np.testing.assert_allclose(found[name]["rows"], found["lstm"]["rows"], rtol=2e-5)  # as above
    assert WARNING not in found[name]["said"]
    # Gradients are summed once a layer, not at every position; over tensor a position needs the whole state before it.
    assert all(one["count"] <= LAYERS for one in collectives(name) if set(one["axes"]) != {"tensor"})
    # Whole on every device: scales, and over fsdp the biases, which are 16 widths of some 550.
    share = found[name]["state_bytes"] / found["lstm"]["state_bytes"]
    assert 0.95 / 4 <= share <= 1.25 / 4


@pytest.mark.full
def test_experts_are_cut_over_their_axis_and_change_no_number():
    found = measured(ROUTED)
    alone, total = found["routed"], found["routed"]["parameters"]
    for name in ROUTED:
        np.testing.assert_allclose(found[name]["rows"], alone["rows"], rtol=2e-5)  # as above
        assert WARNING not in found[name]["said"]
    experts = LAYERS * 8 * 3 * WIDTH * 64
    # The rest is whole on every device, but for the router, which has 256 parameters a layer.
    share = found["experts"]["state_bytes"] / alone["state_bytes"]
    assert share == pytest.approx((total - experts * 7 / 8) / total, rel=0.05)


def test_axes_of_size_1_send_nothing():
    found = run(TOGETHER)
    assert found["tied"]["collectives"] == found["untied"]["collectives"] == []


@pytest.mark.full
def test_a_whole_run_on_a_mesh_ends_with_a_result(tmp_path):
    mesh = {"data": 2, "fsdp": 2, "sequence": 2}
    config = config_file(tmp_path, corpus(tmp_path), batch_size=8, mesh=mesh)
    done = train_on_eight_devices(config, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < json.loads((tmp_path / "run" / "result.json").read_text())["loss"] < 6


def test_a_run_that_its_mesh_cannot_cut_is_refused_in_one_line(tmp_path):
    config = config_file(tmp_path, corpus(tmp_path), batch_size=12)
    done = train_on_eight_devices(config, tmp_path / "run")
    assert done.returncode == 2
    assert "these do not divide: rows a microbatch (batch_size / accumulate) 12 over data 8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
