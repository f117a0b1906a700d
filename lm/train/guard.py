"""Updates that are left out: a gradient that is not finite, or a loss or gradient norm far above the run's own.

Judged inside the compiled step, from numbers that lie in the state: a resumed run leaves out the same updates.
"""

import jax
import jax.numpy as jnp

from lm.train.config import OnNan, OnSpike, RunConfig

Guard = dict  # of scalars; see `fresh_guard`

JUDGED = ("loss", "grad_norm")


def fresh_guard() -> Guard:
    """The guard at step 0: counts of updates and, for each judged number, its running mean and variance."""
    zero = lambda dtype: jnp.zeros((), dtype)  # noqa: E731
    return {
        "kept": zero(jnp.int32),
        "skipped": zero(jnp.int32),
        "skipped_in_row": zero(jnp.int32),
        **{f"{name}_{moment}": zero(jnp.float32) for name in JUDGED for moment in ("mean", "variance")},
    }


def judge(config: RunConfig, guard: Guard, metrics: dict[str, jax.Array]) -> tuple[jax.Array, Guard, dict]:
    """Whether the update of a step is left out, the guard after it, and what the step reports of that.

    A spike is a number more than `spike_deviations` running standard deviations above its running mean, over the last
    `spike_window` updates or so, once half as many have been made. Both follow Finch (2009), "Incremental calculation
    of weighted mean and variance", section 9, with weight max(1/window, 1/n).

    Returns:
      skip bool [], the guard, and float32 [] "skipped" (0 or 1), "skipped_in_row" and "spike" (0 or 1).
    """
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    high = jnp.zeros((), bool)
    for name in JUDGED:
        deviation = jnp.sqrt(guard[f"{name}_variance"])
        high |= metrics[name] > guard[f"{name}_mean"] + config.spike_deviations * deviation
    spike = finite & high & (guard["kept"] >= config.spike_window // 2)
    skip = jnp.zeros((), bool)
    if config.on_nan is OnNan.SKIP:
        skip |= ~finite
    if config.on_spike is OnSpike.SKIP:
        skip |= spike
    kept = guard["kept"] + 1
    weight = jnp.maximum(1 / config.spike_window, 1 / kept.astype(jnp.float32))
    updated = {"kept": kept, "skipped": guard["skipped"], "skipped_in_row": jnp.zeros((), jnp.int32)}
    for name in JUDGED:
        away = metrics[name] - guard[f"{name}_mean"]
        updated[f"{name}_mean"] = guard[f"{name}_mean"] + weight * away
        updated[f"{name}_variance"] = (1 - weight) * (guard[f"{name}_variance"] + weight * away**2)
    left_out = {**guard, "skipped": guard["skipped"] + 1, "skipped_in_row": guard["skipped_in_row"] + 1}
    after = chosen(skip, left_out, updated)
    told = {"skipped": skip, "skipped_in_row": after["skipped_in_row"], "spike": spike}
    return skip, after, {name: value.astype(jnp.float32) for name, value in told.items()}


def chosen(condition: jax.Array, yes, no):
    """The tree `yes` where the scalar `condition` holds, else `no`; what is not chosen may hold NaN."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
