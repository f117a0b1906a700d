"""What has to be the same for logits to be the same to the bit: a model's numbers and all that computes with them."""

import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lm
from lm.base.config import canonical_json
from lm.model.config import ModelConfig
from lm.run.record import environment


def model_hash(config: ModelConfig, params: Any) -> str:
    """SHA-256 over the configuration and over name, type, shape and bytes of every parameter."""
    found = hashlib.sha256(canonical_json(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def platform_facts() -> dict[str, str]:
    """What may change the last bit of a logit: versions, devices, threads, instruction set, flags of the compiler."""
    facts = environment()
    names = ("jax", "jaxlib", "machine", "devices", "processes", "threads", "xla_flags")
    return {
        "lm": lm.__version__,
        **{name: facts[name] for name in names},
        "backend": jax.default_backend(),
        "instructions": _instructions(),
        "matmul_precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        "nproc": os.environ.get("NPROC", ""),
    }


def _instructions() -> str:
    """A hash of the processor's features, empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
