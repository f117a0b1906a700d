"""What utilisation is measured against: a chip's published rate, or this machine's own matrix products."""

import time

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one chip, from the makers' data sheets as of 2026-11 (NVIDIA without sparsity).
PUBLISHED_BFLOAT16 = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}

_SIDE = 1024


def peak_flops(dtype: str) -> float:
    """FLOP/s that one device can reach in products of `dtype`.

    A known accelerator gives its published bfloat16 rate, whatever `dtype`; any other device is measured.
    """
    kind = jax.devices()[0].device_kind
    matches = [name for name in PUBLISHED_BFLOAT16 if kind.startswith(name)]
    return PUBLISHED_BFLOAT16[max(matches, key=len)] if matches else measured_matmul_flops(dtype)


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
