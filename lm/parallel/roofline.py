"""The least time of a step on given chips, from published rates: what bounds it, and how well chips could be used."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lm.parallel.chips import Chip
from lm.parallel.collectives import Collective, Kind

ASSUMPTIONS = (
    "products at the published bfloat16 peak",
    "memory traffic as if everything between products were fused, at the published rate",
    "collectives as rings over the links of the torus dimensions that their axes extend over, both ways at once",
    "a step lies between the largest of the times (perfect overlap) and their sum (none)",
)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on each resource of a chip; `ici` are the links of a slice, `dcn` the network between slices.

    `dcn` is infinite where something crosses slices and no rate is published.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float

    @property
    def overlapped(self) -> float:
        """Seconds of a step if all resources are busy at once."""
        return max(self.compute, self.hbm, self.ici, self.dcn)

    @property
    def serial(self) -> float:
        """Seconds of a step if each resource waits for the others."""
        return self.compute + self.hbm + self.ici + self.dcn

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(("compute", "hbm", "ici", "dcn"), key=lambda name: getattr(self, name))


def roofline(
    chip: Chip, flops: float, traffic: float, sent: Iterable[Collective], mesh: Mesh, torus: Sequence[int]
) -> Roofline:
    """The times of a step.

    Args:
      chip: its rates.
      flops: that one chip executes.
      traffic: bytes between one chip and its memory.
      sent: the collectives of the compiled step.
      mesh: its devices.
      torus: chips along each dimension of a slice.
    """
    ici = dcn = 0.0
    for collective in sent:
        devices, slices = _crossed(mesh, collective.axes)
        members = len(devices) // slices  # of the group in one slice: each sends its share of what leaves the slice
        ici += collective.count * ring_bytes(collective, members) / (chip.link_rate * ring_links(devices, torus))
        if slices > 1:
            share = collective.count * ring_bytes(collective, slices) / members
            dcn += share / chip.dcn_rate if chip.dcn_rate else math.inf
    return Roofline(flops / chip.flops, traffic / chip.hbm_rate, ici, dcn)


def ring_bytes(collective: Collective, size: int) -> float:
    """Bytes that each of `size` devices sends in one execution (Thakur et al. 2005, doi 10.1177/1094342005051521)."""
    if collective.kind is Kind.COLLECTIVE_PERMUTE:
        return collective.bytes
    rounds = 2 if collective.kind is Kind.ALL_REDUCE else 1
    return rounds * collective.bytes * (size - 1) / size


def ring_links(devices: Sequence[Any], torus: Sequence[int]) -> int:
    """Links of a chip that a collective of `devices` can use: two for each dimension that they extend over.

    One, where the slice's dimension is no ring: rings have multiples of 4 chips in a 3-D torus and of 16 in a 2-D one.
    """
    ring = 4 if len(torus) == 3 else 16
    crossed = [
        size for dimension, size in enumerate(torus) if len({device.coords[dimension] for device in devices}) > 1
    ]
    return sum(2 if size % ring == 0 else 1 for size in crossed) or 1


def _crossed(mesh: Mesh, axes: Sequence[str]) -> tuple[list[Any], int]:
    """The devices of the first group over `axes`, and how many slices they lie in."""
    first = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    devices = list(np.asarray(mesh.devices)[first].flat)
    return devices, len({getattr(device, "slice_index", 0) for device in devices})
