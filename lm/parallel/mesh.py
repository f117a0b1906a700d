"""The device mesh; this is the only file that makes one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.base.errors import UsageError

AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes all that the others leave."""

    data: int = -1
    fsdp: int = 1


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices, or over those given, with axes `AXES`, of Auto type (Linen partitioning needs it).

    Raises:
      UsageError: the axes do not multiply to the number of devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    count = jax.device_count() if devices is None else len(devices)
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if min(sizes) < -1 or sizes.count(-1) > 1 or fixed < 1 or count % fixed or (-1 not in sizes and fixed != count):
        raise UsageError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} does not fit {count} devices",
            where="config.mesh",
            do="Let the axes multiply to the device count, or set one to -1.",
        )
    shape = tuple(count // fixed if size == -1 else size for size in sizes)
    return jax.make_mesh(shape, AXES, (jax.sharding.AxisType.Auto,) * len(AXES), devices=devices)
