"""What chips can do: one dated table of published rates, for utilisation and for rooflines."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published rates of one chip.

    Attributes:
      kind: beginning of JAX's `device_kind`.
      flops: dense bfloat16 FLOP/s, float32 sums.
      hbm_bytes: bytes of memory.
      hbm_rate: bytes/s to and from it, together.
      links: links to neighbours (TPU: two a dimension of the torus; GPU: 1, the switch).
      link_rate: bytes/s of one link in one direction.
      dcn_rate: bytes/s of a chip's share of its host's network in one direction; None where none is published.
      source: where the numbers stand.
    """

    kind: str
    flops: float
    hbm_bytes: float
    hbm_rate: float
    links: int
    link_rate: float
    dcn_rate: float | None
    source: str

    @property
    def balance(self) -> float:
        """FLOPs a byte of memory traffic at which products and memory take equally long."""
        return self.flops / self.hbm_rate


AS_OF = "2026-11-30"

_GIB = 2**30
_TPU = "docs.cloud.google.com/tpu/docs/"
_GPU = "NVIDIA data sheet, without sparsity: "

CHIPS = (
    # Jouppi et al. 2023 (arXiv:2304.01433), table 4, has the six links of 50 GB/s.
    Chip("TPU v4", 275e12, 32 * _GIB, 1200e9, 6, 50e9, None, _TPU + "v4 and arXiv:2304.01433"),
    Chip("TPU v5 lite", 197e12, 16 * _GIB, 819e9, 4, 50e9, 25e9 / 8, _TPU + "v5e: 400 GB/s both ways over 4 ports"),
    Chip("TPU v5", 459e12, 95 * _GIB, 2765e9, 6, 100e9, 50e9 / 8, _TPU + "v5p: 1200 GB/s both ways over 6 ports"),
    Chip("TPU v6 lite", 918e12, 32 * _GIB, 1638e9, 4, 100e9, None, _TPU + "v6e: 800 GB/s both ways over 4 ports"),
    Chip("NVIDIA A100", 312e12, 80e9, 2039e9, 1, 300e9, None, _GPU + "A100 80GB SXM"),
    Chip("NVIDIA H100", 989e12, 80e9, 3350e9, 1, 450e9, None, _GPU + "H100 SXM"),
    Chip("NVIDIA H100 PCIe", 756e12, 80e9, 2000e9, 1, 300e9, None, _GPU + "H100 PCIe"),
    Chip("NVIDIA H200", 989e12, 141e9, 4800e9, 1, 450e9, None, _GPU + "H200 SXM"),
)


def chip_of(device_kind: str) -> Chip | None:
    """The row of the longest name that `device_kind` begins with; None for a device that is not in the table."""
    matches = [chip for chip in CHIPS if device_kind.startswith(chip.kind)]
    return max(matches, key=lambda chip: len(chip.kind), default=None)
