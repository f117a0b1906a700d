"""Run with eight virtual devices: the same few steps on several meshes, as JSON on standard output."""

import json
import sys

import jax
import numpy as np

from lm.base.errors import UsageError
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import put_batch
from lm.train.loop import train
from lm.train.step import fresh_state, make_train_step
from tests.train.tiny import run_config

jax.config.update("jax_numpy_rank_promotion", "raise")

CONFIG = run_config("unused", "batch_size=16", "model.d_model=32", "model.vocab_size=64")


def batch_of(seed: int) -> dict[str, np.ndarray]:
    tokens_BW = np.random.default_rng(seed).integers(0, 64, (16, 17), dtype=np.int32)
    return {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": np.ones((16, 16), np.float32)}


def on(mesh, config=CONFIG) -> dict:
    state, step = fresh_state(config, mesh), make_train_step(config, mesh)
    leaves = jax.tree.leaves((state["params"], state["opt_state"]))
    first = jax.devices()[0]
    on_first = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == first)
    losses = []
    for seed in range(5):
        state, metrics = step(state, put_batch(batch_of(seed), mesh), np.float32(0.01))
        losses.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    return {"rows": losses, "bytes": sum(leaf.nbytes for leaf in leaves), "bytes_on_first": on_first}


def refusal(config) -> str:
    try:
        train(config, f"{sys.argv[1]}/refused")
    except UsageError as error:
        return str(error)
    return ""


def main() -> None:
    text = sys.argv[2]
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    found = {
        "devices": jax.device_count(),
        "one": on(one),
        "data": on(make_mesh(MeshConfig())),
        "fsdp": on(make_mesh(MeshConfig(data=1, fsdp=-1))),
        "both": on(make_mesh(MeshConfig(data=2, fsdp=4))),
        "rows": refusal(run_config(text, "batch_size=12")),
        "microbatch": refusal(run_config(text, "batch_size=16", "accumulate=4")),
        "width": refusal(run_config(text, "batch_size=8", "mesh.data=1", "mesh.fsdp=8", "model.d_model=12")),
        "mesh": refusal(run_config(text, "mesh.data=3", "mesh.fsdp=2")),
        "run": train(
            run_config(text, "batch_size=8", "mesh.data=2", "mesh.fsdp=4", "accumulate=1"), sys.argv[1] + "/r"
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
