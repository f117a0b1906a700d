"""What libtpu is told before it is loaded: environment variables that it reads once.

Where the package is installed, JAX loads it in every process that asks for devices. On a machine without a TPU it then
looks for one, and complains of what nobody has told it.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

# A machine that stands alone: else libtpu asks a metadata service.
ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

GOOGLE = "0x1ae0"  # PCI vendor, of virtual network cards and disks too
NO_CHIP = ("0x01", "0x02")  # PCI classes: storage, network


def quiet_without_tpu(
    environment: MutableMapping[str, str] = os.environ, devices: Path = Path("/sys/bus/pci/devices")
) -> None:
    """Spares a machine without a TPU libtpu's complaints; one that has a TPU, or may have one, is left alone.

    `devices` lists PCI devices as Linux does. To be called before JAX asks for devices; processes started later
    inherit it.
    """
    if devices.is_dir() and "JAX_FORCE_TPU_INIT" not in environment and not any(map(_may_be_chip, devices.iterdir())):
        for name, value in ALONE.items():
            environment.setdefault(name, value)


def _may_be_chip(device: Path) -> bool:
    vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    return vendor == GOOGLE and not kind.startswith(NO_CHIP)
