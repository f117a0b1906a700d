"""Eight virtual devices of the CPU: three steps on each mesh, and what XLA made of them.

`measured` starts `python -m experiments.meshes.eight NAME...` with so many devices; it prints JSON. The sizes of the
vocabulary and of its parts are those of no other axis.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.base.config import build, override
from lm.parallel.collectives import collectives
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import AXES, batch_sharding, put_batch
from lm.train.config import RunConfig
from lm.train.step import abstract_state, fresh_state, make_train_step

ROOT = Path(__file__).parents[2]
DEVICES = 8
# Code that is quick to compile: it runs three steps.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ROWS, LENGTH, WIDTH, LAYERS, KV_HEADS, HEAD, VOCABULARY = 16, 32, 32, 2, 8, 4, 264
CONFIG = {
    "model": {"vocab_size": VOCABULARY, "context_length": LENGTH, "n_layer": LAYERS, "d_model": WIDTH, "d_ff": 64,
              "n_head": 16, "d_head": HEAD},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
    "data": {"corpus": "none"},
    "steps": 3, "batch_size": ROWS,
}  # fmt: skip
MODELS = {
    "tied": (f"model.n_kv_head={KV_HEADS}",),
    "untied": ("model.tied_embedding=false", "model.norm=layernorm", "model.feed_forward=gelu", "model.bias=true",
               "model.positions=learned", "model.qk_norm=true", "data.segment_mask=true"),
    "lstm": ("model.mixer=lstm", "model.n_head=1", "model.d_head=none", "model.positions=none", "model.bias=true",
             "model.feed_forward=none", "model.d_ff=0", "data.segment_mask=true"),
    "routed": (f"model.n_kv_head={KV_HEADS}", "model.experts.count=8", "model.experts.chosen=2"),
}  # fmt: skip
# What else changes on these meshes, without changing the numbers.
OTHERS = {"data-fsdp-tensor": ("accumulate=2",), "fsdp-sequence": ("model.remat=full",)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh; `others` are overrides of its configuration."""

    model: str
    axes: dict[str, int]
    others: tuple[str, ...] = ()


def _cases() -> dict[str, Case]:
    """Every set of axes that eight devices lie along, with the plainer model on a single one."""
    cases = {}
    for sizes in ((8,), (2, 4), (2, 2, 2)):
        for axes in itertools.combinations(AXES, len(sizes)):
            name = "-".join(axes)
            model = "tied" if len(axes) == 1 else "untied"
            cases[name] = Case(model, dict(zip(axes, sizes, strict=True)), OTHERS.get(name, ()))
    return cases


CASES = _cases()
ROUTED = {
    "experts": Case("routed", {"expert": DEVICES}),
    "experts-fsdp-tensor": Case("routed", {"fsdp": 2, "expert": 2, "tensor": 2}),
}
RECURRENT = {"lstm-data-fsdp-tensor": Case("lstm", {"data": 2, "fsdp": 2, "tensor": 2})}


def measured(names: Iterable[str]) -> dict[str, Any]:
    """Runs the named cases in a process of eight devices.

    Returns, by the name of each case and of each of its models on one device, "rows" (loss, gradient norm, parameter
    norm of each step), "collectives", "state_bytes" and "temporary_bytes" of a device, "parameters", and "said", what
    XLA wrote to standard error meanwhile.
    """
    done = subprocess.run(
        [sys.executable, "-m", "experiments.meshes.eight", *names], env=eight_devices(_QUICK), cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in found:
        found[name]["said"] = done.stderr.partition(f"case {name}\n")[2].partition("\ncase ")[0]
    return found


def eight_devices(flags: str = "") -> dict[str, str]:
    """The environment of a process with eight devices, with more `flags` for XLA."""
    forced = f"--xla_force_host_platform_device_count={DEVICES} {flags}"
    return {**os.environ, "XLA_FLAGS": forced, "JAX_PLATFORMS": "cpu"}


def config_of(model: str, axes: dict[str, int], others: tuple[str, ...] = ()) -> RunConfig:
    """The configuration of a case."""
    config = override(build(RunConfig, CONFIG), [*MODELS[model], *others])
    return dataclasses.replace(config, mesh=MeshConfig(**{"data": 1, **axes}))


def batch_of(config: RunConfig, seed: int) -> dict[str, np.ndarray]:
    """A batch of random tokens and weights, and documents where the model looks at them."""
    draw = np.random.default_rng(seed)
    tokens_BW = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    weights_BT = (draw.random((ROWS, LENGTH)) < 0.9).astype(np.float32)
    batch = {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}
    if config.data.segment_mask:
        batch["segments"] = np.cumsum(draw.random((ROWS, LENGTH)) < 0.1, axis=1, dtype=np.int32)
    return batch


def compiled_step(config: RunConfig, mesh: Mesh) -> tuple[jax.stages.Compiled, Any]:
    """The train step and its abstract state."""
    abstract, sharding = abstract_state(config, mesh), batch_sharding(mesh, config.mesh.rules)
    batch = {
        name: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding)
        for name, rows in batch_of(config, 0).items()
    }
    lr = jax.ShapeDtypeStruct((), np.float32)
    return make_train_step(config, mesh).lower(abstract, batch, lr).compile(), abstract


def steps_on(config: RunConfig, devices: int, initial: Any) -> dict[str, Any]:
    """Three steps from the state `initial`, as `measured` tells of them."""
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    compiled, abstract = compiled_step(config, mesh)
    state = jax.device_put(initial, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    rows = []
    for seed in range(3):
        state, metrics = compiled(state, put_batch(batch_of(config, seed), mesh, config.mesh.rules), np.float32(0.01))
        rows.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    memory: Any = compiled.memory_analysis()
    return {
        "rows": rows,
        "collectives": [dataclasses.asdict(one) for one in collectives(compiled.as_text() or "", mesh)],
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(abstract["params"])),
    }


def main() -> None:
    """Prints what was found for each case named on the command line, and for its model on one device."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert jax.device_count() == DEVICES
    found, initial = {}, {}
    for name in sys.argv[1:]:
        case = (CASES | ROUTED | RECURRENT)[name]
        if case.model not in initial:
            alone = config_of(case.model, {})
            initial[case.model] = jax.device_get(fresh_state(alone, make_mesh(alone.mesh, jax.devices()[:1])))
            found[case.model] = steps_on(alone, 1, initial[case.model])
        print(f"case {name}", file=sys.stderr, flush=True)
        found[name] = steps_on(config_of(case.model, case.axes, case.others), DEVICES, initial[case.model])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
