"""How the programs of decoding are compiled."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA on CPU takes YNN's products. Those of several rows are 1.3 to 2 times as fast by Eigen, those of one row are not;
# sums and maxima stay with YNN, which vectorises them (jax 0.10.2 and 0.12.0.1, docs/diary.md).
_SEVERAL_ROWS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


@functools.cache
def compiled(function: Callable[..., Any], *, several: bool, static: tuple[str, ...], donated: str) -> Any:
    """`jax.jit` of a function whose matrix products have `several` rows, or one."""
    options = _SEVERAL_ROWS if several and jax.default_backend() == "cpu" and _known() else None
    return jax.jit(function, static_argnames=static, donate_argnames=(donated,), compiler_options=options)


@functools.cache
def _known() -> bool:
    """Whether this XLA has the option: it is experimental, and a newer one may do without."""
    try:
        jax.jit(lambda: 0, compiler_options=_SEVERAL_ROWS).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
