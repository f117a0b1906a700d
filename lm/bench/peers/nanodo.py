"""nanodo's way in JAX, written anew: plain Linen layers, whole T x T attention, optax AdamW in a TrainState.

One module a layer in a Python loop, DenseGeneral for the heads, a masked softmax by flax, everything in one dtype.
It starts from the parameters that it is given, so that its first loss shows whether it is the same function.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import traverse_util
from flax.training.train_state import TrainState


class Block(nn.Module):
    """Causal attention and a two-matrix feed-forward, each behind a LayerNorm without bias."""

    heads: int
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD):
        """One layer of the residual stream."""
        D = x_BTD.shape[-1]
        y_BTD = nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=self.dtype, name="attention_norm")(x_BTD)
        q_BTHC, k_BTHC, v_BTHC = (
            nn.DenseGeneral((self.heads, D // self.heads), use_bias=False, dtype=self.dtype, name=name)(y_BTD)
            for name in ("query", "key", "value")
        )
        mask_BHTS = nn.make_causal_mask(jnp.ones(x_BTD.shape[:2]))
        mixed_BTHC = nn.dot_product_attention(q_BTHC, k_BTHC, v_BTHC, mask=mask_BHTS, dtype=self.dtype)
        x_BTD = x_BTD + nn.DenseGeneral(D, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(mixed_BTHC)
        y_BTD = nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=self.dtype, name="feed_forward_norm")(x_BTD)
        hidden_BTF = nn.gelu(nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up")(y_BTD))
        return x_BTD + nn.Dense(D, use_bias=False, dtype=self.dtype, name="down")(hidden_BTF)


class Model(nn.Module):
    """Token ids in, logits out."""

    sizes: dict
    dtype: Any

    @nn.compact
    def __call__(self, tokens_BT):
        """Logits [B, T, V] in float32."""
        sizes = self.sizes
        embed = nn.Embed(sizes["vocab_size"], sizes["d_model"], dtype=self.dtype, name="tokens")
        position = nn.Embed(sizes["context_length"], sizes["d_model"], dtype=self.dtype, name="positions")
        x_BTD = embed(tokens_BT) + position(jnp.arange(tokens_BT.shape[1])[None])
        for i in range(sizes["n_layer"]):
            x_BTD = Block(sizes["n_head"], sizes["d_ff"], self.dtype, name=f"block_{i}")(x_BTD)
        x_BTD = nn.LayerNorm(epsilon=1e-5, use_bias=False, dtype=self.dtype, name="final_norm")(x_BTD)
        return embed.attend(x_BTD).astype(jnp.float32)


def setup(spec: dict):
    """Builds model and state, compiles, does the first step, and returns its loss and gradient norm with the step."""
    arrays = dict(np.load(spec["arrays"]))
    settings = spec["optimizer"]
    model = Model(spec["sizes"], jnp.dtype(spec["dtype"]))
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings["clip_norm"]),
        optax.adamw(settings["lr"], settings["b1"], settings["b2"], settings["eps"],
                    weight_decay=settings["weight_decay"], mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    )  # fmt: skip
    state = TrainState.create(apply_fn=model.apply, params=_params(arrays, spec["sizes"]["n_layer"]), tx=optimizer)
    batch = jax.device_put((arrays["inputs"], arrays["targets"]))

    def train_step(state: TrainState, inputs_BT, targets_BT):
        def loss_of(params):
            logits_BTV = state.apply_fn({"params": params}, inputs_BT)
            return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), (loss, optax.global_norm(grads))

    jitted = jax.jit(train_step, donate_argnums=0)
    begun = time.perf_counter()
    state, (loss, norm) = jitted(state, *batch)
    facts = {"loss": float(loss), "grad_norm": float(norm), "first_step_seconds": time.perf_counter() - begun,
             "jax": jax.__version__, "threads": spec["threads"]}  # fmt: skip

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = jitted(state, *batch)
        jax.block_until_ready((state, metrics))

    run(2)
    return facts, run


def _params(arrays: dict, layers: int) -> dict:
    """The given parameters under this model's names; ours are stacked over layers."""
    flat = {
        "tokens/embedding": arrays["params/embedding"],
        "positions/embedding": arrays["params/position/embedding"],
        "final_norm/scale": arrays["params/final_norm/scale"],
    }
    names = {
        **{f"{norm}/scale": f"{norm}/scale" for norm in ("attention_norm", "feed_forward_norm")},
        **{f"{part}/kernel": f"attention/{part}/kernel" for part in ("query", "key", "value", "out")},
        **{f"{part}/kernel": f"feed_forward/{part}/kernel" for part in ("up", "down")},
    }
    for i in range(layers):
        flat |= {f"block_{i}/{own}": arrays[f"params/layers/{given}"][i] for own, given in names.items()}
    return traverse_util.unflatten_dict({name: jnp.asarray(value) for name, value in flat.items()}, sep="/")
