import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import RunError, UsageError
from lm.run import integrity
from lm.run.checkpoint import Checkpoints, latest_step, load_params

SAVE_FOR_EVER = """
import itertools, sys
import jax.numpy as jnp
from lm.run.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in itertools.count(1):
    state = {"params": {"w": jnp.full((64, 64), step, jnp.float32)}, "step": jnp.int32(step)}
    checkpoints.save(step, state, {"step": step})
    print(step, flush=True)
"""


TWO_HUNDRED_SAVES = """
import ctypes, gc, resource, sys
import jax, jax.numpy as jnp
from lm.run.checkpoint import Checkpoints

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

checkpoints = Checkpoints(sys.argv[1], keep=2)
step_up = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
state = {"params": {name: jnp.zeros((512, 512)) for name in "abcd"}, "step": jnp.int32(0)}
for step in range(1, 201):
    state = step_up(state)
    checkpoints.save(step, state, {"step": step})
    if step in (20, 200):
        checkpoints.wait()
        print(held(), flush=True)
checkpoints.close()
"""


UNTIL_FULL = """
import contextlib, sys
import jax.numpy as jnp
from lm.base.errors import RunError
from lm.run.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=100)
state = {str(number): jnp.full((64, 64), number, jnp.float32) for number in range(30)}
with contextlib.suppress(RunError), contextlib.closing(checkpoints):
    for step in range(1, 100):
        checkpoints.save(step, state, {})
        checkpoints.wait()
print("full")
"""


EIGHT_DEVICES = """
import sys
import jax
import numpy as np
from lm.run.checkpoint import Checkpoints, load_params

def over(count):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

whole = np.arange(64, dtype=np.float32).reshape(16, 4)
state = {"params": {"w": jax.device_put(whole, over(8))}, "step": np.int32(1)}
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, state, {})
checkpoints.close()
_, params = load_params(sys.argv[1], {"w": jax.ShapeDtypeStruct((16, 4), np.float32, sharding=over(2))})
print(jax.device_count(), len(params["w"].addressable_shards), np.array_equal(params["w"], whole))
"""


TWO_PROCESSES = """
import sys
import jax
import numpy as np

from lm.base.errors import RunError, UsageError
from lm.parallel.launcher import Group
from lm.parallel.processes import joined
from lm.run.checkpoint import Checkpoints

index, address, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def accept(meta):
    assert index == 0
    if meta["step"] == 3:
        raise RunError("its rows are gone")

def refuse(meta):
    raise UsageError("another data pipeline")

with joined(Group(address, 2, index, "a test")) as team:
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    noise = np.random.default_rng(0).random((64, 64), np.float32)
    checkpoints = Checkpoints(path, keep=3, team=team)
    for step in (1, 2, 3):
        numbers = np.full((8, 4), step, np.float32)
        state = {
            "w": jax.make_array_from_callback(numbers.shape, cut, lambda part: numbers[part]),
            "held_by_both": jax.make_array_from_callback(noise.shape, whole, lambda part: noise[part]),
        }
        checkpoints.save(step, state, {"step": step})
    checkpoints.wait()
    team.agreed("saved")
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found = checkpoints.restore_latest(wanted, accept)
    checkpoints.save(3, state, {"step": 3})
    checkpoints.wait()
    (shard,) = found.state["w"].addressable_shards
    print("found", found.step, shard.index[0].start, float(shard.data[0, 0]), *found.skipped, flush=True)
    checkpoints.restore_latest(wanted, refuse)
"""


class Moments(NamedTuple):
    count: jax.Array
    mu: dict[str, jax.Array]


def state_at(step: int, width: int = 8) -> dict:
    generator = np.random.default_rng(step)
    weights = {name: jnp.asarray(generator.normal(size=(2, width, width)), jnp.float32) for name in ("a", "b")}
    return {"params": weights, "opt_state": (Moments(jnp.int32(step), weights), ()), "step": jnp.int32(step)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def equal(one, other) -> bool:
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, other)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(jax.tree.leaves(same))


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of steps 1, 2 and 3; tests copy it."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state_at(step), {"step": step})
    checkpoints.close()
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restored(path: Path, **options):
    checkpoints = Checkpoints(path, keep=3)
    try:
        return checkpoints.restore_latest(abstract(state_at(0)), **options)
    finally:
        checkpoints.close()


def data_file(folder: Path) -> Path:
    """The largest file of a checkpoint, which is one that holds arrays."""
    return max((path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, where: int) -> None:
    content = bytearray(path.read_bytes())
    content[where] ^= 0x10
    path.write_bytes(bytes(content))


def test_the_newest_comes_back_bit_for_bit_in_the_same_tree(saved):
    found = restored(saved)
    assert (found.step, found.meta, found.skipped) == (3, {"step": 3}, [])
    assert equal(found.state, state_at(3))


def test_no_checkpoint_is_none_and_not_an_error(tmp_path):
    assert restored(tmp_path / "new") is None
    assert latest_step(tmp_path / "new") is None


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 4):
        checkpoints.save(step, state_at(step), {})
    checkpoints.close()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["3", "4"]
    assert latest_step(tmp_path) == 4


def test_those_at_multiples_are_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=4)
    for step in range(2, 11, 2):
        checkpoints.save(step, state_at(step), {})
    checkpoints.close()
    assert sorted(int(child.name) for child in tmp_path.iterdir()) == [4, 8, 10]


def test_a_state_donated_right_after_saving_is_saved_as_it_was(tmp_path):
    step_up = partial(jax.jit, donate_argnums=0)(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    state = {name: jnp.zeros((256, 256)) for name in "abcd"}
    sharded = abstract(state)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(6):
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = step_up(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        found = checkpoints.restore_latest(sharded)
        assert found is not None
        assert all((np.asarray(leaf) == 3 * step).all() for leaf in jax.tree.leaves(found.state))
    checkpoints.close()


def truncate(folder: Path) -> None:
    path = data_file(folder)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(folder: Path) -> None:
    path = data_file(folder)
    flip(path, path.stat().st_size // 2)


def delete_a_file(folder: Path) -> None:
    data_file(folder).unlink()


def damage_meta(folder: Path) -> None:
    flip(folder / "meta" / "metadata", 3)


def delete_the_seal(folder: Path) -> None:
    (folder / integrity.NAME).unlink()


def empty_the_seal(folder: Path) -> None:
    (folder / integrity.NAME).write_text("{}")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, delete_a_file, damage_meta, delete_the_seal, empty_the_seal, empty]
)
def test_a_damaged_newest_is_passed_over_named_and_its_step_can_be_saved_again(copy, damage):
    damage(copy / "3")
    checkpoints = Checkpoints(copy, keep=3)
    found = checkpoints.restore_latest(abstract(state_at(0)))
    assert found is not None
    assert found.step == 2
    assert equal(found.state, state_at(2))
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("checkpoint 3 is passed over: ")
    checkpoints.save(3, state_at(3), {"step": 3})
    checkpoints.close()
    assert equal(restored(copy).state, state_at(3))
    assert (copy / "3.corrupt").is_dir()


def test_every_flipped_byte_of_a_files_end_middle_and_start_is_noticed_or_harmless(copy):
    """No flip in any file of a checkpoint, the unsealed ones included, gives another state without a word."""
    for path in sorted(path for path in (copy / "3").rglob("*") if path.is_file()):
        original = path.read_bytes()
        for where in {0, len(original) // 2, len(original) - 1}:
            flip(path, where)
            if integrity.defect(copy / "3") is None:
                assert equal(load_params(copy, abstract(state_at(0))["params"])[1], state_at(3)["params"]), path
            path.write_bytes(original)


def test_a_refused_meta_makes_the_search_go_on(copy):
    def refuse_late(meta):
        if meta["step"] > 1:
            raise RunError(f"no rows for {meta['step']}")

    found = restored(copy, accept=refuse_late)
    assert found.step == 1
    assert found.skipped == [f"checkpoint {step} is passed over: no rows for {step}" for step in (3, 2)]
    assert latest_step(copy) == 1


def test_a_request_that_is_wrong_ends_the_search(copy):
    def refuse(meta):
        raise UsageError("another data pipeline")

    with pytest.raises(UsageError, match="another data pipeline"):
        restored(copy, accept=refuse)
    assert sorted(child.name for child in copy.iterdir()) == ["1", "2", "3"]


def test_when_none_can_be_used_the_error_names_each_and_nothing_is_renamed(copy):
    for step in "123":
        flip_a_bit(copy / step)
    with pytest.raises(RunError, match=r"checkpoint 3.*checkpoint 2.*checkpoint 1.*another folder") as caught:
        restored(copy)
    assert caught.value.exit_code == 1
    assert sorted(child.name for child in copy.iterdir()) == ["1", "2", "3"]


def leaf(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"a": leaf((2, 8, 8), jnp.bfloat16)}, r"params\.a is float32\[2, 8, 8\], not bfloat16"),
        ({"b": leaf((2, 8, 4), jnp.float32)}, r"params\.b is float32\[2, 8, 8\], not float32\[2, 8, 4\]"),
        ({"c": leaf((2,), jnp.float32)}, r"params\.c is missing"),
    ],
)
def test_another_type_shape_or_leaf_is_refused_by_name(saved, change, told):
    wanted = abstract(state_at(0))
    wanted["params"] |= change
    checkpoints = Checkpoints(saved, keep=3)
    with pytest.raises(RunError, match=told):
        checkpoints.restore_latest(wanted)
    checkpoints.close()
    with pytest.raises(RunError, match=told):
        load_params(saved, wanted["params"])


def test_a_leaf_that_nobody_asked_for_is_refused(saved):
    wanted = abstract(state_at(0))
    del wanted["params"]["b"]
    checkpoints = Checkpoints(saved, keep=3)
    with pytest.raises(RunError, match=r"params\.b is not expected"):
        checkpoints.restore_latest(wanted)
    checkpoints.close()


def test_parameters_alone_are_read_and_nothing_is_written(copy, caplog):
    flip_a_bit(copy / "3")
    step, params = load_params(copy, abstract(state_at(0))["params"])
    assert step == 2
    assert equal(params, state_at(2)["params"])
    assert "checkpoint 3 is passed over" in caplog.text
    assert sorted(child.name for child in copy.iterdir()) == ["1", "2", "3"]


def test_parameters_of_a_run_without_checkpoints_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint"):
        load_params(tmp_path / "none", {})


# TensorStore's other writes end after Orbax has closed the event loop that they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays_whole(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=1)
    checkpoints.save(1, state_at(1), {"step": 1})
    checkpoints.wait()
    (small_disk / "filler").write_bytes(b"x" * 500_000)
    checkpoints.save(2, state_at(2, width=300), {"step": 2})
    with pytest.raises(RunError, match="no space left"):
        checkpoints.wait()
    (small_disk / "filler").unlink()
    found = restored(small_disk / "checkpoints")
    assert (found.step, found.skipped) == (1, [])
    assert equal(found.state, state_at(1))


@pytest.mark.slow
def test_a_full_disk_has_no_tracebacks_of_libraries_and_keeps_no_part_of_what_failed(small_disk):
    path = small_disk / "checkpoints"
    told = subprocess.run([sys.executable, "-c", UNTIL_FULL, str(path)], capture_output=True, text=True, check=True)
    assert told.stdout == "full\n"
    assert "Traceback" not in told.stderr
    assert [child.name for child in path.iterdir() if not child.name.isdigit()] == []


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_fails_meanwhile_is_told_without_another_save(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=1)
    (small_disk / "filler").write_bytes(b"x" * 500_000)
    checkpoints.check()
    checkpoints.save(1, state_at(1, width=300), {"step": 1})
    deadline = time.monotonic() + 60
    with pytest.raises(RunError, match="no space left"):
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_host_memory_does_not_grow_from_save_20_to_save_200(tmp_path):
    # One arena: what threads of earlier saves have freed is used again by those of later ones, not kept beside it.
    told = subprocess.run([sys.executable, "-c", TWO_HUNDRED_SAVES, str(tmp_path)], capture_output=True, text=True,
                          check=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"})  # fmt: skip
    early, late = map(int, told.stdout.split())
    assert late < 1.01 * early, f"{early:,} bytes after 20 saves, {late:,} after 200"


@pytest.mark.slow
def test_parameters_of_eight_devices_are_read_by_two_and_by_one(tmp_path):
    """The process of eight saves over eight and reads over two of them; this one has one device."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    told = subprocess.run([sys.executable, "-c", EIGHT_DEVICES, str(tmp_path)], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    assert told.stdout.split() == ["8", "2", "True"]
    step, params = load_params(tmp_path, {"w": leaf((16, 4), jnp.float32)})
    assert (step, len(params["w"].sharding.device_set)) == (1, 1)
    np.testing.assert_array_equal(params["w"], np.arange(64, dtype=np.float32).reshape(16, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_after_kill_9_in_the_middle_of_saving_the_newest_is_whole(tmp_path, seed):
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in itertools.islice(process.stdout, 3):
            last = int(line)
        time.sleep(random.Random(seed).uniform(0, 0.2))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        "params": {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)},
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
    }
    checkpoints = Checkpoints(tmp_path, keep=2)
    found = checkpoints.restore_latest(wanted)
    assert found is not None
    assert found.step >= last - 1  # saving a step returns only when the step before is on the disk
    assert found.skipped == []
    assert found.meta == {"step": found.step}
    assert int(found.state["step"]) == found.step
    assert (np.asarray(found.state["params"]["w"]) == found.step).all()
    checkpoints.save(found.step + 1, found.state, {"step": found.step + 1})
    checkpoints.close()
    assert all(child.name.isdigit() for child in tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_agree_on_the_checkpoint_and_each_gets_its_shard(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    path = tmp_path / "checkpoints"
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), address, str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for index in (0, 1)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    passed_over = "checkpoint 3 is passed over: its rows are gone"
    assert [out[out.index("found") :].strip() for out, _ in said] == [
        f"found 2 0 2.0 {passed_over}",
        f"found 2 4 2.0 {passed_over}",
    ]
    assert sorted(child.name for child in path.iterdir()) == ["1", "2", "3", "3.corrupt"]
    # Of an array that both hold each writes a half.
    written = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
               for folder in (path / "2" / "state").glob("ocdbt.process_*")]  # fmt: skip
    assert len(written) == 2
    assert min(written) > 0.4 * sum(written)
    # What process 0 refuses ends both, each with its reason.
    assert [process.returncode for process in processes] == [2, 2]
    assert [error.splitlines()[-1] for _, error in said] == [
        "lm: another data pipeline",
        "lm: process 0 of 2 ended: another data pipeline",
    ]


def test_the_meta_is_the_one_at_the_call_whatever_its_owner_does_next(tmp_path):
    state = {"params": {"w": jnp.ones(4)}}
    with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
        rows = [1.0]
        checkpoints.save(1, state, {"rows": rows})
        rows.append(2.0)
        checkpoints.wait()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored = checkpoints.restore_latest(shapes)
    assert restored.meta == {"rows": [1.0]}
