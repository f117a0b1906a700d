"""Eight virtual devices of the CPU in a process of their own: the mesh changes where numbers lie, not what they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train.tiny import corpus

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.eight", str(folder), corpus(folder)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ["data", "fsdp", "both"])
def test_every_mesh_gives_the_losses_of_one_device(found, mesh):
    assert found["devices"] == 8
    # float32 sums over devices in another order, five steps long; Adam divides noise by noise near gradient 0
    np.testing.assert_allclose(found[mesh]["rows"], found["one"]["rows"], rtol=2e-4)


def test_parameters_and_moments_are_cut_over_fsdp_and_only_over_it(found):
    share = {mesh: found[mesh]["bytes_on_first"] / found[mesh]["bytes"] for mesh in ("one", "data", "fsdp", "both")}
    assert share["one"] == share["data"] == 1
    # Scalars and what has no axis of width D stay whole: one step counter here.
    assert share["fsdp"] == pytest.approx(1 / 8, rel=0.01)
    assert share["both"] == pytest.approx(1 / 4, rel=0.01)


def test_what_does_not_fit_the_devices_is_refused_by_name(found):
    assert "12 rows a microbatch do not divide over 8 devices" in found["rows"]
    assert "4 rows a microbatch do not divide over 8 devices" in found["microbatch"]
    assert "d_model 12 does not divide over 8 devices" in found["width"]
    assert "does not fit 8 devices" in found["mesh"]


def test_a_whole_run_on_a_mesh_ends_with_a_result(found):
    assert 0 < found["run"]["loss"] < 6
