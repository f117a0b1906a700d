"""Run with eight virtual devices: three steps on each mesh, and what XLA made of them, as JSON on standard output.

The sizes of the vocabulary and of its parts are those of no other axis.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.parallel.collectives import collectives
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import batch_sharding, put_batch
from lm.train.config import RunConfig
from lm.train.step import abstract_state, fresh_state, make_train_step
from tests.train.tiny import run_config

jax.config.update("jax_numpy_rank_promotion", "raise")

ROWS, LENGTH, WIDTH, LAYERS, KV_HEADS, HEAD, VOCABULARY = 16, 32, 32, 2, 8, 4, 264
SHAPE = (f"batch_size={ROWS}", f"model.context_length={LENGTH}", f"model.vocab_size={VOCABULARY}",
         f"model.n_layer={LAYERS}", f"model.d_model={WIDTH}", "model.d_ff=64", "model.n_head=16",
         f"model.d_head={HEAD}")  # fmt: skip
MODELS = {
    "tied": (f"model.n_kv_head={KV_HEADS}",),
    "untied": ("model.tied_embedding=false", "model.norm=layernorm", "model.feed_forward=gelu", "model.bias=true",
               "model.positions=learned", "model.qk_norm=true", "data.segment_mask=true"),
}  # fmt: skip
# Name: the model, the mesh, and what else changes without changing the numbers.
CASES: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "replica": ("tied", {"replica": 8}, ()),
    "data": ("tied", {"data": 8}, ()),
    "fsdp": ("tied", {"fsdp": 8}, ()),
    "expert": ("tied", {"expert": 8}, ()),
    "sequence": ("tied", {"sequence": 8}, ()),
    "tensor": ("tied", {"tensor": 8}, ()),
    "data-fsdp-tensor": ("untied", {"data": 2, "fsdp": 2, "tensor": 2}, ("accumulate=2",)),
    "fsdp-sequence": ("untied", {"fsdp": 2, "sequence": 4}, ("model.remat=full",)),
    "replica-fsdp-tensor": ("untied", {"replica": 2, "fsdp": 2, "tensor": 2}, ()),
    "expert-sequence-tensor": ("untied", {"expert": 2, "sequence": 2, "tensor": 2}, ()),
}


def config_of(model: str, axes: dict[str, int], others: tuple[str, ...] = ()) -> RunConfig:
    config = run_config("unused", *SHAPE, *MODELS[model], *others)
    return dataclasses.replace(config, mesh=MeshConfig(**{"data": 1, **axes}))


def batch_of(config: RunConfig, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens_BW = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    weights_BT = (draw.random((ROWS, LENGTH)) < 0.9).astype(np.float32)
    batch = {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}
    if config.data.segment_mask:
        batch["segments"] = np.cumsum(draw.random((ROWS, LENGTH)) < 0.1, axis=1, dtype=np.int32)
    return batch


def compiled_step(config: RunConfig, mesh: Mesh) -> tuple[Any, Any]:
    abstract, sharding = abstract_state(config, mesh), batch_sharding(mesh, config.mesh.rules)
    batch = {
        name: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding)
        for name, rows in batch_of(config, 0).items()
    }
    lr = jax.ShapeDtypeStruct((), np.float32)
    return make_train_step(config, mesh).lower(abstract, batch, lr).compile(), abstract


def steps_on(config: RunConfig, devices: int, initial: Any) -> dict[str, Any]:
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    compiled, abstract = compiled_step(config, mesh)
    state = jax.device_put(initial, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    rows = []
    for seed in range(3):
        state, metrics = compiled(state, put_batch(batch_of(config, seed), mesh, config.mesh.rules), np.float32(0.01))
        rows.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    memory = compiled.memory_analysis()
    return {
        "rows": rows,
        "collectives": [dataclasses.asdict(one) for one in collectives(compiled.as_text(), mesh)],
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(abstract["params"])),
    }


def main() -> None:
    """Prints what was found for each case named on the command line, and for its model on one device."""
    found: dict[str, Any] = {"devices": jax.device_count()}
    initial = {}
    for name in sys.argv[1:]:
        model, axes, others = CASES[name]
        if model not in initial:
            alone = config_of(model, {})
            initial[model] = jax.device_get(fresh_state(alone, make_mesh(alone.mesh, jax.devices()[:1])))
            found[model] = steps_on(alone, 1, initial[model])
        print(f"case {name}", file=sys.stderr, flush=True)
        found[name] = steps_on(config_of(model, axes, others), 8, initial[model])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
