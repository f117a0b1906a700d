"""libtpu is kept quiet where there is no TPU, and only there."""

import os
import subprocess
import sys

import pytest

from lm.parallel.libtpu import ALONE, quiet_without_tpu

CHIP, NETWORK_CARD, DISK = ("0x1ae0", "0x088000"), ("0x1ae0", "0x020000"), ("0x1ae0", "0x010802")
OTHER = ("0x1d0f", "0x088000")


def machine(folder, *devices):
    for number, (vendor, kind) in enumerate(devices):
        device = folder / f"0000:00:{number:02x}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    return folder


@pytest.mark.parametrize("devices", [(CHIP,), (OTHER, NETWORK_CARD, CHIP, CHIP)])
def test_a_machine_with_a_tpu_is_left_alone(tmp_path, devices):
    environment: dict[str, str] = {}
    quiet_without_tpu(environment, machine(tmp_path, *devices))
    assert environment == {}


def test_so_is_one_of_which_nothing_is_known_and_one_that_insists(tmp_path):
    environment: dict[str, str] = {}
    quiet_without_tpu(environment, tmp_path / "none")
    assert environment == {}
    environment = {"JAX_FORCE_TPU_INIT": "1"}
    quiet_without_tpu(environment, machine(tmp_path, OTHER))
    assert environment == {"JAX_FORCE_TPU_INIT": "1"}


def test_without_a_tpu_what_is_set_already_stays(tmp_path):
    environment = {"TPU_WORKER_ID": "7"}
    quiet_without_tpu(environment, machine(tmp_path, OTHER, NETWORK_CARD, DISK))
    assert environment == {**ALONE, "TPU_WORKER_ID": "7"}


@pytest.mark.slow
def test_a_command_on_a_machine_without_a_tpu_says_nothing_of_one():
    pytest.importorskip("libtpu", reason="libtpu (the extra 'aot') is not installed")
    code = "from lm.cli import main; main(['status', 'nowhere']); import jax; print(jax.devices()[0].platform)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_"))}
    # The lock that another process of this machine may hold would keep libtpu from saying anything.
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if done.stdout != "cpu\n":
        pytest.skip(f"this machine has a {done.stdout.strip()}")
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["lm status"]
