"""The machine's own limits as contestants: products, and reading memory."""

import concurrent.futures
import os

import jax
import jax.numpy as jnp
import numpy as np

from lm.bench.interleave import Run, Taken, timed
from lm.model.config import Dtype

MATMUL_SIDES = (1024, 1536, 2048)
READ_BYTES = 256 * 2**20  # far more than a cache holds
READ_TIMES = 4  # in a row: the first finds what lay idle since the last round


def threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def products(dtype: Dtype) -> dict[str, Run]:
    """Square products, for `matmul_rate`."""
    return {_product(dtype, side): _matmul(dtype, side) for side in MATMUL_SIDES}


def matmul_rate(taken: Taken, dtype: Dtype) -> float:
    """FLOP/s: the best side of each round, the median over rounds."""
    sides = [[2 * side**3 / s for s in taken.seconds[_product(dtype, side)]] for side in MATMUL_SIDES]
    return float(np.median(np.max(sides, axis=0)))


def reads() -> dict[str, Run]:
    """The maximum of a long array, `READ_TIMES` over, by one thread a core, for `read_rate`.

    By NumPy itself and not by BLAS, which starts threads of its own within each part.
    """
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), threads())
    pool = concurrent.futures.ThreadPoolExecutor(threads())
    return {"read": timed(lambda: [list(pool.map(np.max, parts)) for _ in range(READ_TIMES)], 1)}


def read_rate(taken: Taken) -> float:
    """Bytes a second, the median over rounds."""
    return READ_TIMES * READ_BYTES / float(np.median(taken.seconds["read"]))


def _matmul(dtype: Dtype, side: int) -> Run:
    a = jax.random.normal(jax.random.key(0), (side, side)).astype(dtype.value)
    product = jax.jit(jnp.matmul)
    return timed(lambda: product(a, a).block_until_ready(), 1)


def _product(dtype: Dtype, side: int) -> str:
    return f"product {side} {dtype.value}"
