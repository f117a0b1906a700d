"""What utilisation is measured against: a chip's published rate, or this machine's own matrix products."""

import time

import jax
import jax.numpy as jnp

from lm.parallel.chips import chip_of

_SIDE = 1024


def peak_flops(dtype: str) -> float:
    """FLOP/s that one device can reach in products of `dtype`.

    A known accelerator gives its published bfloat16 rate, whatever `dtype`; any other device is measured.
    """
    chip = chip_of(jax.devices()[0].device_kind)
    return measured_matmul_flops(dtype) if chip is None else chip.flops


def measured_matmul_flops(dtype: str, seconds: float = 0.2) -> float:
    """The best rate, in FLOP/s, of repeated 1024 x 1024 x 1024 products of `dtype`, tried for `seconds`."""
    a = jax.random.normal(jax.random.key(0), (_SIDE, _SIDE)).astype(dtype)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        before = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - before)
    return 2 * _SIDE**3 / best
