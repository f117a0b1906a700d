"""The device mesh; this is the only file that makes one."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from lm.base.errors import UsageError
from lm.parallel.rules import AXES, Rules


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1, at most once, takes all that the others leave.

    `rules` are looked up before those of `lm.parallel.rules`, which say what each axis is for.
    """

    replica: int = 1
    data: int = -1
    fsdp: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1
    rules: Rules = ()


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `devices` (None: all) with axes `AXES`, of Auto type (Linen partitioning needs it).

    Where the devices lie in several slices (groups with a fast network of their own), the slices are spread over the
    outermost axes, so that the inner ones stay inside a slice.

    Raises:
      UsageError: the axes do not multiply to the number of devices, or no outer axes multiply to the number of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = _shape(config, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    # An axis that is no product of whole dimensions of a torus gets parts of them.
    if slices == 1:
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        outer = _slices_along(shape, slices)
        inner = [size // among for size, among in zip(shape, outer, strict=True)]
        placed = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
    sizes = [getattr(config, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if min(sizes) < -1 or sizes.count(-1) > 1 or fixed < 1 or devices % fixed or (-1 not in sizes and fixed != devices):
        raise UsageError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} does not fit {devices} devices",
            where="config.mesh",
            do="Let the axes multiply to the device count, or set one to -1.",
        )
    return tuple(devices // fixed if size == -1 else size for size in sizes)


def _slices_along(shape: tuple[int, ...], slices: int) -> list[int]:
    """Over how many slices each axis extends: the outermost axes take as many as they can."""
    outer, left = [], slices
    for size in shape:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if left > 1:
        raise UsageError(
            f"mesh {dict(zip(AXES, shape, strict=True))} cannot be spread over {slices} slices",
            where="config.mesh",
            do=f"Set config.mesh.replica to {slices}, or to a multiple of it.",
        )
    return outer
