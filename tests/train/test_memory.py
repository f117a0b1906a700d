"""Device memory that runs out, really: the same global batch in more microbatches, or one line."""

import logging
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm.train.loop as loop
from experiments.faults.kill import run_function
from lm.base.errors import RunError
from lm.parallel.mesh import make_mesh
from lm.train.memory import FittingStep, memory_told, microbatch_counts
from lm.train.step import make_train_step
from tests.train.tiny import corpus, rows, run_config

MESH = make_mesh(run_config("unused").mesh)
TOO_MUCH = 1 << 47  # floats: more than a processor can address


def counts(batch, first=1):
    return microbatch_counts(run_config("unused", f"batch_size={batch}", f"accumulate={first}"), first, MESH)


def add_up(count):
    """A step that needs too much memory with fewer than four microbatches."""
    spare = TOO_MUCH if count < 4 else 1
    return jax.jit(lambda state, batch, lr: (state + batch["x"], jnp.zeros(spare) + lr), donate_argnums=0)


def test_a_step_that_does_not_fit_is_tried_with_more_microbatches_and_then_stays(caplog):
    step = FittingStep(add_up, counts(8), lambda: jnp.ones(3))
    with caplog.at_level(logging.WARNING, "lm.train"):
        state, _ = step(jnp.ones(3), {"x": jnp.full(3, 2.0)}, 0.0)
    assert step.accumulate == 4
    assert "out of device memory with accumulate=1, trying 2: Out of memory allocating" in caplog.text
    assert "accumulate=2, trying 4" in caplog.text
    np.testing.assert_array_equal(step(state, {"x": jnp.ones(3)}, 0.0)[0], np.full(3, 4.0))


def test_a_state_that_the_failed_step_consumed_is_made_again():
    state, made = jnp.ones(3), []

    def make(count):
        def step(state, batch, lr):
            if count == 1:
                state.delete()
                jax.jit(lambda: jnp.zeros(TOO_MUCH))()
            return add_up(4)(state, batch, lr)

        return step

    def again():
        made.append(jnp.ones(3))
        return made[0]

    step = FittingStep(make, counts(8), again)
    np.testing.assert_array_equal(step(state, {"x": jnp.ones(3)}, 0.0)[0], np.full(3, 2.0))
    assert len(made) == 1


def test_when_no_smaller_microbatch_is_left_it_is_one_line_that_says_what_to_do():
    step = FittingStep(add_up, counts(2), lambda: jnp.ones(3))
    told = r"out of device memory: Out of memory allocating \d+ bytes.*remat"
    with pytest.raises(RunError, match=told) as caught, memory_told():
        step(jnp.ones(3), {"x": jnp.ones(3)}, 0.0)
    assert "\n" not in str(caught.value)


def test_another_error_of_the_device_stays_itself():
    def make(count):
        def step(*_):
            raise jax.errors.JaxRuntimeError("INTERNAL: broken")

        return step

    step = FittingStep(make, counts(8), lambda: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"), memory_told():
        step(jnp.ones(3), {}, 0.0)


@pytest.mark.parametrize(
    ("batch", "first", "found"), [(8, 1, [1, 2, 4, 8]), (12, 1, [1, 2, 4, 12]), (12, 3, [3, 6, 12]), (7, 1, [1, 7])]
)
def test_counts_at_least_double_and_divide_the_batch(batch, first, found):
    assert list(counts(batch, first)) == found


def short_of_memory(text: str, run: str) -> None:
    """Trains while the first steps have too small an address space as configured, and enough for half of that."""
    spare: list[float] = []

    def make(config, mesh):
        step = make_train_step(config, mesh)

        def limited(state, batch, lr):
            compiled = step.lower(state, batch, lr).compile()  # its threads need room of their own
            spare.append(0.75 * compiled.memory_analysis().temp_size_in_bytes)
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
            resource.setrlimit(resource.RLIMIT_AS, (int(used + spare[0]), resource.RLIM_INFINITY))
            try:
                return jax.block_until_ready(compiled(state, batch, lr))
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        return limited

    loop.make_train_step = make
    loop.train(run_config(text, *BIG), run)


BIG = ("batch_size=4096", "steps=2", "checkpoint_every=1", "model.context_length=8")


@pytest.mark.slow
def test_a_run_short_of_memory_goes_on_with_more_microbatches_and_records_them(tmp_path):
    text = corpus(tmp_path, documents=2000, words=20)
    ended = run_function(short_of_memory, (text, str(tmp_path / "run")), tmp_path / "said")
    assert ended.code == 0, (signal.Signals(-ended.code) if ended.code < 0 else ended.code, ended.said)
    assert "out of device memory with accumulate=1, trying 2" in ended.said
    recorded = (tmp_path / "run" / "result.json").read_text()
    assert '"accumulate": 2' in recorded
    row = loop.train(run_config(text, *BIG, "accumulate=2"), tmp_path / "asked")
    assert row["accumulate"] == 2
    assert rows(tmp_path / "run") == rows(tmp_path / "asked")
