"""The four starts: each is found, named in the log, and begins with the parameters that it should."""

import json
import shutil

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.base.config import build, override
from lm.base.errors import UsageError
from lm.data.corpus import prepare
from lm.parallel.mesh import make_mesh
from lm.train.config import RunConfig
from lm.train.identity import cell_id, identity_of
from lm.train.restore import load_run
from lm.train.step import State, fresh_state
from tests.train.tiny import corpus, run_config, train_with


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return [corpus(folder, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def source(tmp_path_factory, texts):
    run = tmp_path_factory.mktemp("source") / "run"
    loop.train(run_config(texts[0]), run)
    return run


def begun(monkeypatch, config, run) -> tuple[State, list[str]]:
    """The state that a run's first step is given, and its log."""

    class BegunError(Exception):
        pass

    seen = []

    def make_train_step(config, mesh):
        def step(state, batch, lr):
            seen.append(jax.device_get(state))
            raise BegunError

        return step

    with pytest.raises(BegunError):
        train_with(monkeypatch, "make_train_step", make_train_step, config, run)
    return seen[0], [line.split(" ", 3)[3] for line in (run / "log.txt").read_text().splitlines()]


def equal(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_a_fresh_run_begins_with_the_parameters_of_its_seed(tmp_path, monkeypatch, texts):
    config = run_config(texts[0], "seed=3")
    state, log = begun(monkeypatch, config, tmp_path / "run")
    assert log == ["fresh start"]
    assert equal(state, jax.device_get(fresh_state(config, make_mesh(config.mesh))))


def test_a_run_begins_with_the_final_parameters_of_another_and_all_else_fresh(tmp_path, monkeypatch, texts, source):
    config = run_config(texts[0], f"init_from={source}", "seed=3")
    state, log = begun(monkeypatch, config, tmp_path / "run")
    assert log == [f"initialised from {source}"]
    fresh = jax.device_get(fresh_state(config, make_mesh(config.mesh)))
    assert equal(state["params"], jax.device_get(load_run(source).params))
    assert equal((state["opt_state"], state["step"]), (fresh["opt_state"], fresh["step"]))


@pytest.mark.slow
def test_another_corpus_is_a_fine_tuning_and_a_checkpoint_of_its_own_comes_first(tmp_path, monkeypatch, texts, source):
    config, run = run_config(texts[1], f"init_from={source}"), tmp_path / "run"
    state, log = begun(monkeypatch, config, run)
    assert log == [f"fine-tuning on another corpus from {source}"]
    assert equal(state["params"], jax.device_get(load_run(source).params))

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "write_result", stop, config, run)
    loop.train(config, run)
    log = (run / "log.txt").read_text().splitlines()
    assert [line.split(" ", 3)[3].split(" ")[0] for line in log] == ["fine-tuning", "fine-tuning", "resumed"]
    assert not equal(jax.device_get(load_run(run).params), state["params"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.d_ff=24", r"other shapes.*feed_forward.*16.*24"),
        ("model.n_layer=2", r"other shapes.*\[1, .*\[2, "),
        ("model.tied_embedding=false", r"other shapes.*head"),
    ],
)
def test_a_source_of_another_shape_is_refused_by_name(tmp_path, texts, source, change, words):
    with pytest.raises(UsageError, match=words):
        loop.train(run_config(texts[0], f"init_from={source}", change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_source_with_another_tokenizer_is_refused(tmp_path, texts, source):
    recorded = json.loads((source / "config.json").read_text())
    (tmp_path / "other").mkdir()
    recorded["identity"]["tokenizer"] = "another"
    (tmp_path / "other" / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UsageError, match="tokenizer is another one"):
        loop.train(run_config(texts[0], f"init_from={tmp_path / 'other'}"), tmp_path / "run")


def test_a_source_that_has_not_finished_is_refused(tmp_path, texts, source):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    recorded = json.loads((source / "config.json").read_text())
    recorded["config"]["steps"] = 99
    (unfinished / "config.json").write_text(json.dumps(recorded))
    (unfinished / "checkpoints").symlink_to(source / "checkpoints")
    with pytest.raises(UsageError, match="its last whole checkpoint is of step 12, not of its last step 99"):
        loop.train(run_config(texts[0], f"init_from={unfinished}"), tmp_path / "run")


def test_a_damaged_final_checkpoint_is_neither_named_nor_started_from(tmp_path, texts, source):
    damaged = shutil.copytree(source, tmp_path / "damaged")
    (damaged / "checkpoints" / "12" / "integrity.json").write_text("{}")
    assert load_run(damaged).step == 10
    with pytest.raises(UsageError, match="its last whole checkpoint is of step 10, not of its last step 12"):
        loop.train(run_config(texts[0], f"init_from={damaged}"), tmp_path / "run")


def test_a_run_is_named_by_every_number_and_text_it_depends_on_and_by_no_path(tmp_path, texts, source):
    cache = tmp_path / "cache"

    def name(*changes: str, text: str = texts[0]) -> str:
        config = run_config(text, *changes)
        return cell_id(config, identity_of(config, prepare(config.data, cache)))

    plain = name()
    (tmp_path / "moved.txt").write_text(open(texts[0]).read())  # noqa: SIM115
    assert name(text=str(tmp_path / "moved.txt")) == plain
    assert name("checkpoint_every=1", "checkpoints_kept=7") == plain

    # A source is what it was trained with, not where it lies.
    (tmp_path / "copy").symlink_to(source)
    started = name(f"init_from={source}")
    assert name(f"init_from={tmp_path / 'copy'}") == started
    recorded = json.loads((source / "config.json").read_text())
    longer = override(build(RunConfig, recorded["config"]), ["seed=9"])
    (tmp_path / "longer").mkdir()
    (tmp_path / "longer" / "config.json").write_text(
        json.dumps({**recorded, "config": {**recorded["config"], "seed": longer.seed}})
    )
    others = [
        name(text=texts[1]), name("seed=1"), name("data.seed=1"), name("steps=13"), name("optimizer.b2=0.9"),
        name("model.rope_base=500"), name("data.segment_mask=true"), name("data.validation_fraction=0.6"), started,
        name(f"init_from={tmp_path / 'longer'}"),
        name("data.extra_validation=" + json.dumps({"other": texts[1]})),
    ]  # fmt: skip
    assert len({plain, *others}) == 1 + len(others)
