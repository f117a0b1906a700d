"""Compilation for TPUs that are not here: a described slice, a program for it, and the memory that it needs.

The `libtpu` package compiles for a slice that it is only told the shape of, on any machine with its CPU alone.
"""

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax

from lm.base.errors import RunError, UsageError
from lm.parallel.libtpu import ALONE

# Generations and their torus. A v4 is left out: libtpu describes its two cores as devices of their own.
DIMENSIONS = {"v5e": 2, "v5p": 3, "v6e": 2}

# What is only described needs no TPU: neither the lock that one process holds, nor a log.
ENVIRONMENT = {**ALONE, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}


def described_devices(topology: str, slices: int = 1) -> list[Any]:
    """The devices of slices like `v5e:16x16`, for compilation only; this process's own devices become CPUs.

    Raises:
      UsageError: no libtpu, or no such slice.
    """
    generation, _, sizes = topology.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", sizes) or DIMENSIONS.get(generation) != sizes.count("x") + 1:
        known = ", ".join(f"{name}:{'x'.join('ABC'[:count])}" for name, count in DIMENSIONS.items())
        raise UsageError(f"there is no slice '{topology}'", where="--topology", do=f"Known: {known}, e.g. v5e:16x16.")
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "libtpu, which compiles for TPUs, is not installed",
            where="--topology",
            do="pip install -e '.[aot]' -c constraints.txt",
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices)
        return list(found.devices)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"libtpu refuses '{topology}': {_first_line(error)}", where="--topology") from None


@dataclasses.dataclass(frozen=True)
class Program:
    """What compilation gave.

    `text` is the optimised program, empty where it does not fit. Bytes are of one chip: `temporaries` are all that the
    step needs beside its arguments, `code` is the program itself. `excess` is the least by which it does not fit.
    """

    text: str
    arguments: int
    temporaries: int
    code: int
    excess: int

    @property
    def peak(self) -> int:
        """Bytes that a chip holds at the most; the new state lies where the old one lay."""
        return self.arguments + self.temporaries + self.code


def compile_ahead(lowered: jax.stages.Lowered, arguments: int) -> Program:
    """Compiles a lowered step whose arguments take so many bytes of a chip.

    Raises:
      RunError: the compiler fails for another reason than memory.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = exceeded(str(error))
        if needed is None:
            raise RunError(f"the TPU compiler failed: {_first_line(error)}") from None
        used, limit = needed
        return Program("", arguments, max(used - arguments, 0), 0, used - limit)
    memory: Any = compiled.memory_analysis()
    # Its temp_size_in_bytes would count what lies elsewhere than in HBM too: the sum can exceed what a chip has.
    temporaries = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return Program(compiled.as_text() or "", memory.argument_size_in_bytes, temporaries, code, 0)


def exceeded(message: str) -> tuple[int, int] | None:
    """Bytes needed and bytes there, as the compiler's refusal states them; None if it refuses for something else."""
    for pattern in (r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
                    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"):  # fmt: skip
        if found := re.search(pattern, message):
            used, unit, limit, limit_unit = found.groups()
            return _bytes(used, unit), _bytes(limit, limit_unit)
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** (" KMGT".index(unit or " ")))


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
