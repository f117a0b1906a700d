"""The device mesh; this is the only file that makes one."""

import dataclasses

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


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over all devices with axes `AXES`, of Auto type (Linen partitioning needs it).

    Raises:
      UsageError: the axes do not multiply to the number of devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    devices = jax.device_count()
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if min(sizes) < -1 or sizes.count(-1) > 1 or fixed < 1 or devices % fixed or (-1 not in sizes and fixed != devices):
        raise UsageError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} does not fit {devices} devices",
            where="config.mesh",
            do="Let the axes multiply to the device count, or set one to -1.",
        )
    shape = tuple(devices // fixed if size == -1 else size for size in sizes)
    return jax.make_mesh(shape, AXES, (jax.sharding.AxisType.Auto,) * len(AXES))
