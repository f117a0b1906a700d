"""AdamW without a learning rate, and the learning rate as a plain function of the step.

The rate enters the compiled step as an argument: cells that differ only in rate, schedule or length share one program,
and after a restore the rate follows from the saved step alone.
"""

import math
from functools import partial

import jax
import optax

from lm.model.accounting import Group, group_of
from lm.train.config import OptimizerConfig, Schedule

_NOT_DECAYED = ("bias", "scale")


def make_optimizer(config: OptimizerConfig, width_ratio: float = 1.0) -> optax.GradientTransformation:
    """Clipping, Adam's direction and decoupled decay; the step multiplies the result by -lr.

    Matrices of layers learn at the rate over `width_ratio` (`lm.model.config.WidthScaling`), and decay at the rate.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101), decay scaled by the learning rate.
    """
    scaled = () if width_ratio == 1 else (optax.stateless(partial(_matrices_over, width_ratio)),)
    clip = (optax.clip_by_global_norm(config.clip_norm),) if config.clip_norm else ()
    return optax.chain(
        *clip,
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        *scaled,
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def decay_mask(params):
    """True for embeddings and matrices, False for biases and normalisation scales."""

    def decayed(path, _) -> bool:
        return not any(getattr(entry, "key", None) in _NOT_DECAYED for entry in path)

    return jax.tree_util.tree_map_with_path(decayed, params)


def _matrices_over(ratio: float, updates, _params):
    def over(path, update: jax.Array) -> jax.Array:
        return update / ratio if group_of(tuple(entry.key for entry in path)) is Group.MATRICES else update

    return jax.tree_util.tree_map_with_path(over, updates)


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The rate of the update that follows `step` finished ones, 0 <= step; constant past the end, never negative."""
    return config.peak_lr * lr_fraction(config, steps, step)


def lr_fraction(config: OptimizerConfig, steps: int, step: int) -> float:
    """`learning_rate` over the peak: linear warm-up, then the schedule down to `final_lr_fraction`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    last = max(steps - 1, config.warmup_steps)
    if config.schedule is Schedule.COSINE:
        begin = config.warmup_steps
    else:
        begin = max(config.warmup_steps, steps - 1 - round(config.cooldown_fraction * steps))
    progress = max(min(step, last) - begin, 0) / max(last - begin, 1)
    fall = 0.5 * (1 - math.cos(math.pi * progress)) if config.schedule is Schedule.COSINE else progress
    return 1.0 - (1.0 - config.final_lr_fraction) * fall
