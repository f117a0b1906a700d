"""A run folder on an object store, with a local folder in the store's place: where the path layers of the libraries
would speak to it, they reach files, which can neither be renamed nor appended to."""

import errno

import jax
import numpy as np
import pytest
from etils.epath import backend, gpath

import lm.train.loop as loop
from lm.base.errors import RunError
from lm.cli import main
from lm.run import remote
from lm.train.restore import load_run
from tests.train.tiny import before_step, config_file, corpus, run_config, train_with

URL = "gs://bucket/runs/one"


class Objects(backend._OsPathBackend):
    """Files under `root` as objects: a rename or an append would be a copy, and is refused."""

    def __init__(self, root):
        self._root = root

    def _file(self, path):
        return str(path).replace("gs:/", f"{self._root}/", 1) if str(path).startswith("gs:/") else path


def _moved(name):
    def call(self, path, *rest, **named):
        return getattr(backend._OsPathBackend, name)(self, self._file(path), *rest, **named)

    return call


for name in ("exists", "isdir", "listdir", "glob", "walk", "makedirs", "mkdir", "rmtree", "remove", "stat"):
    setattr(Objects, name, _moved(name))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The folder in which the objects of gs:// lie; Orbax's own questions to Google are answered here."""
    from orbax.checkpoint._src.path import gcs_utils

    root = tmp_path / "store"

    def opened(self, path, mode):
        assert not mode.startswith("a"), f"{path} cannot be appended to"
        return backend._OsPathBackend.open(self, self._file(path), mode)

    def renamed(self, path, to):
        assert str(to).endswith(".corrupt"), f"{path} cannot be renamed"
        backend._OsPathBackend.rename(self, self._file(path), self._file(to))

    monkeypatch.setattr(Objects, "open", opened)
    monkeypatch.setattr(Objects, "rename", renamed)
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Objects(str(root)))
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)

    def kvstore(path):
        end = "" if path.endswith("_sharding") else "/"  # an object; all others begin names of objects
        return {"driver": "file", "path": path.replace("gs:/", str(root), 1) + end}

    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", kvstore)
    monkeypatch.setattr(remote, "_installed", lambda name: True)
    return root / "bucket" / "runs" / "one"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


def stop():
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_on_a_store_goes_on_from_it_in_another_folder_and_has_the_bytes_of_a_local_one(
    tmp_path, monkeypatch, text, store
):
    config, cache = run_config(text), tmp_path / "cache"
    loop.train(config, tmp_path / "local", cache=cache)
    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", before_step(8, stop), config, URL)
    assert sorted(path.name for path in (store / "checkpoints").iterdir()) == ["5"]
    assert (store / "checkpoints" / "5" / "commit_success.txt").exists()
    loop.train(config, URL)
    assert "resumed after step 5" in (store / "log.txt").read_text()
    assert (store / "metrics.jsonl").read_bytes() == (tmp_path / "local" / "metrics.jsonl").read_bytes()
    ours, theirs = (jax.device_get(load_run(path).params) for path in (URL, tmp_path / "local"))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours, theirs)))
    assert (store / "result.json").exists()
    assert sorted(path.name for path in (store / "checkpoints").iterdir()) == ["10", "12"]


@pytest.mark.slow
def test_a_damaged_checkpoint_on_a_store_is_passed_over(monkeypatch, text, store):
    config = run_config(text)
    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", before_step(12, stop), config, URL)
    (store / "checkpoints" / "10" / "integrity.json").unlink()
    loop.train(config, URL)
    assert "checkpoint 10 is passed over" in (store / "log.txt").read_text()
    assert "resumed after step 5" in (store / "log.txt").read_text()


def test_a_store_that_cannot_be_reached_is_one_line(monkeypatch, text, store):
    def unreachable(*_, **__):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(Objects, "exists", unreachable)
    with pytest.raises(RunError, match=r"gs://bucket/runs/one: the store cannot be reached: .*No route to host"):
        loop.train(run_config(text), URL)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/run", "gs://bucket/run: gs:// needs gcsfs google-cloud-storage. pip install gcsfs"),
        ("s3://bucket/run", "s3://bucket/run: checkpoints can be written to a local or mounted folder and to gs://"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_done(tmp_path, capsys, monkeypatch, text, url, words):
    monkeypatch.setattr(remote, "_installed", lambda name: False)
    assert main(["train", "--config", str(config_file(tmp_path, text)), "--workdir", url]) == 2
    assert words in capsys.readouterr().err
