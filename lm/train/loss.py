"""The training loss, as sums: whoever divides knows over how many tokens."""

import jax
import jax.numpy as jnp

from lm.model.config import Experts
from lm.model.score import predicted, token_log_probs


def loss_sums(logits_BTV, batch: dict, z_loss: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Summed objective of a microbatch, and the sums that its metrics are made of.

    Args:
      logits_BTV: float32, of all places of a row or of the last ones; others bear no loss.
      batch: "targets" int32 [B, T] and "weights" float32 [B, T] (0 leaves a position out).
      z_loss: weight of logsumexp(logits)^2 (Chowdhery et al. 2022, arXiv:2204.02311, section 5).

    Returns:
      The objective in nats summed over tokens, and {"nll": nats, "tokens": weight}.
    """
    targets_BT, weights_BT = (predicted(logits_BTV, batch[name]) for name in ("targets", "weights"))
    nll = -jnp.sum(token_log_probs(logits_BTV, targets_BT) * weights_BT)
    objective = nll
    if z_loss:
        objective += z_loss * jnp.sum(jnp.square(jax.nn.logsumexp(logits_BTV, axis=-1)) * weights_BT)
    return objective, {"nll": nll, "tokens": jnp.sum(weights_BT)}


def with_routers(
    objective: jax.Array, sums: dict[str, jax.Array], routed: dict[str, jax.Array], experts: Experts | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What `loss_sums` returned, with the losses of routers (`lm.model.experts.router_losses`) by their weights.

    They are means over the microbatch, and count for each of its tokens.
    """
    for name, loss in routed.items():
        sums = {**sums, name: loss * sums["tokens"]}
        objective += getattr(experts, name) * sums[name]
    return objective, sums
