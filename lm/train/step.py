"""One optimizer step: a pure function of (state, batch, rate), compiled once for a shape."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lm.model.attention import Attention, Plain
from lm.model.experts import TOLD, router_losses
from lm.model.fused import choose
from lm.model.transformer import Transformer
from lm.parallel.rules import batch_sharding, flax_rules, placed, replicated, sharded
from lm.train.config import RunConfig
from lm.train.guard import chosen, fresh_guard, judge
from lm.train.loss import loss_sums, with_routers
from lm.train.optimizer import make_optimizer

# {"params": float32 tree, "opt_state": optax state, "step": int32 []}; with on_nan or on_spike also "guard".
State = dict


def init_state(config: RunConfig, key) -> State:
    """A fresh state whose parameters still carry their logical axis names (see `abstract_state`)."""
    tokens_BT = jnp.zeros((1, config.model.context_length), jnp.int32)
    params = Transformer(config.model).init(key, tokens_BT)["params"]
    optimizer = make_optimizer(config.optimizer, config.model.width_ratio)
    state = {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
    return {**state, "guard": fresh_guard()} if config.guarded else state


def abstract_state(config: RunConfig, mesh: Mesh) -> State:
    """Shapes, dtypes and shardings of the state, without computing anything."""
    return placed(jax.eval_shape(lambda: init_state(config, jax.random.key(0))), mesh, config.mesh.rules)


def fresh_state(config: RunConfig, mesh: Mesh) -> State:
    """The state at step 0, created where it will live: a pure function of `config.seed`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    init = jax.jit(lambda key: nn.unbox(init_state(config, key)), out_shardings=shardings)
    return init(jax.random.key(config.seed))


def make_train_step(config: RunConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """The jitted step `(state, batch, lr) -> (state, metrics)`; `state` is donated.

    `batch` holds int32 "inputs" and "targets" [B, T], float32 "weights" [B, T] and, for masked documents, int32
    "segments" [B, T]; of a model with patches also float32 "patches" [B, T, P]. `metrics` are float32 scalars: "loss"
    (nats/token, weighted mean), "grad_norm" (before clipping), "param_norm" (after the update), of experts those of
    `router_losses`; a guarded step adds those of `lm.train.guard.judge`.
    """
    optimizer = make_optimizer(config.optimizer, config.model.width_ratio)
    attention = choose(config.model, config.model.context_length, mesh, flax_rules(config.mesh.rules))
    gradients = _accumulated(loss_gradients(config, attention), config.accumulate)

    def step(state: State, batch: dict, lr):
        with sharded(mesh, config.mesh.rules):
            grads, sums = gradients(state["params"], batch)
        tokens = jnp.maximum(sums["tokens"], 1.0)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], jax.tree.map(lambda u: -lr * u, updates))
        metrics = {
            "loss": sums["nll"] / tokens,
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
            **{name: total / tokens for name, total in sums.items() if name not in ("nll", "tokens")},
        }
        after = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return _guarded(config, state, after, metrics) if config.guarded else (after, metrics)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh, config.mesh.rules), replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _guarded(config: RunConfig, before: State, after: State, metrics: dict) -> tuple[State, dict]:
    """The step with its guard: parameters and moments stay as they were where the update is left out."""
    skip, guard, told = judge(config, before["guard"], metrics)
    learned = chosen(skip, *({name: state[name] for name in ("params", "opt_state")} for state in (before, after)))
    metrics = {**metrics, "param_norm": optax.tree.norm(learned["params"]), **told}
    return {**learned, "step": after["step"], "guard": guard}, metrics


def loss_gradients(config: RunConfig, attention: Attention = Plain()) -> Callable:
    """`(params, batch) -> (gradient of the summed objective, sums)` of one microbatch."""
    model, experts = Transformer(config.model, attention=attention), config.model.experts

    def objective(params, batch: dict):
        inputs = (batch["inputs"], batch.get("segments"), batch.get("patches"))
        logits_BTV, told = model.apply({"params": params}, *inputs, mutable=[TOLD])
        objective, sums = loss_sums(logits_BTV, batch, config.z_loss)
        return with_routers(objective, sums, router_losses(told), experts)

    return jax.grad(objective, has_aux=True)


def _accumulated(gradients: Callable, count: int) -> Callable:
    """Sums gradients and token counts over `count` microbatches, so that dividing once weights every token alike."""
    if count == 1:
        return gradients

    def accumulate(params, batch: dict):
        # Row i goes to microbatch i % count: each microbatch then spans all devices, as the whole batch does.
        micro = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)
        first = jax.tree.map(lambda x: x[0], micro)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradients, params, first))
        add = lambda total, rows: (jax.tree.map(jnp.add, total, gradients(params, rows)), None)  # noqa: E731
        return jax.lax.scan(add, zeros, micro)[0]

    return accumulate
