"""What a wrong request gets: one line on standard error that names it, exit code 2, and nothing written."""

import json
import shutil

import pytest

from lm.cli import main
from tests.train.tiny import BASE, config_file, corpus


@pytest.fixture
def text(tmp_path):
    return corpus(tmp_path)


def refused(capsys, *argv: str) -> str:
    """The one line that `lm train` ends with, exit code 2."""
    assert main(["train", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("lm train: ")
    return err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.n_hed=2", ["unknown field 'n_hed'", "'n_head'"]),
        ("optimiser.peak_lr=1", ["unknown field 'optimiser'", "'optimizer'"]),
        ("model.n_head=3", ["n_head 3 does not divide d_model 16"]),
        ("model.norm_eps=0", ["norm_eps is 0.0; it must be above 0"]),
        ("model.rope_base=-1", ["rope_base is -1.0"]),
        ("model.init_std=0", ["init_std is 0.0"]),
        ("model.vocab_size=258", ["vocab_size is 258", "257 entries"]),
        ("batch_size=three", ["config.batch_size", "'three' is not a number"]),
        ("optimizer.peak_lr=nan", ["config.optimizer.peak_lr"]),
        ("accumulate=3", ["accumulate 3 does not divide batch_size 4"]),
        ("mesh.data=3", ["mesh", "does not fit 1 devices"]),
        ("mesh.data=-2", ["mesh", "does not fit 1 devices"]),
        ("data.corpus=/nowhere/at/all.txt", ["/nowhere/at/all.txt"]),
        ("data.tokenizer=/nowhere/tokenizer.json", ["/nowhere/tokenizer.json"]),
        ("data.extra_validation={", ["config.data.extra_validation", "not JSON"]),
        ("model.context_length=100000", ["fewer than one window of 100000"]),
        ("init_from=/nowhere/run", ["/nowhere/run", "not a run folder"]),
        ("steps", ["'steps' has no value"]),
    ],
)
def test_a_wrong_leaf_is_refused_by_name(tmp_path, capsys, text, override, words):
    run = tmp_path / "run"
    line = refused(capsys, "--config", config_file(tmp_path, text), "--workdir", run, f"--config.{override}")
    assert all(word in line for word in words), line
    assert not (run / "config.json").exists()


def test_a_wrong_config_file_is_refused_by_name(tmp_path, capsys, text):
    run = tmp_path / "run"
    assert "no such config file" in refused(capsys, "--config", tmp_path / "none.py", "--workdir", run)
    path = config_file(tmp_path, text)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "step": 3}))
    assert "Did you mean 'steps'?" in refused(capsys, "--config", path, "--workdir", run)
    path.write_text(json.dumps({name: values[name] for name in values if name != "optimizer"}))
    assert "'optimizer' is missing" in refused(capsys, "--config", path, "--workdir", run)
    assert not run.exists()


@pytest.mark.parametrize("content", ["", "\n\n\n"])
def test_an_empty_corpus_is_refused(tmp_path, capsys, content):
    (tmp_path / "empty.txt").write_text(content)
    path = config_file(tmp_path, str(tmp_path / "empty.txt"))
    assert "empty.txt: there is no text in it" in refused(capsys, "--config", path, "--workdir", tmp_path / "run")


def test_a_folder_of_something_else_stays_as_it_was(tmp_path, capsys, text):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("x")
    assert "thesis.tex" in refused(capsys, "--config", config_file(tmp_path, text), "--workdir", run)
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_folders_place_is_refused(tmp_path, capsys, text):
    (tmp_path / "run").write_text("x")
    assert "run: cannot be a run folder" in refused(
        capsys, "--config", config_file(tmp_path, text), "--workdir", tmp_path / "run"
    )


@pytest.mark.slow
def test_another_configuration_or_corpus_is_refused_and_the_run_stays_as_it_was(tmp_path, capsys, text):
    run, path = tmp_path / "run", config_file(tmp_path, text)
    command = ["--config", path, "--workdir", run, "--cache", tmp_path / "cache"]
    assert main(["train", *map(str, command), "--config.steps=2"]) == 0
    capsys.readouterr()
    # The lock says who holds it and since when.
    files = lambda: {x: x.read_bytes() for x in run.rglob("*") if x.is_file() and x.name != ".lock"}  # noqa: E731
    before = files()
    assert "config.steps: 2 -> 12" in refused(capsys, *command)
    assert "config.model.d_model: 16 -> 32" in refused(
        capsys, *command, "--config.steps=2", "--config.model.d_model=32"
    )
    shutil.copy(text, tmp_path / "kept")
    with open(text, "a") as file:
        file.write("\n\na new document at the end of it")
    line = refused(capsys, *command, "--config.steps=2")
    assert "identity.corpus" in line
    assert files() == before
    shutil.copy(tmp_path / "kept", text)
    assert main(["train", *map(str, command), "--config.steps=2"]) == 0
    assert {name: content for name, content in files().items() if name.name != "log.txt"} == {
        name: content for name, content in before.items() if name.name != "log.txt"
    }


def test_a_profile_beyond_the_run_and_a_missing_package_are_refused(tmp_path, capsys, text, monkeypatch):
    command = ["--config", str(config_file(tmp_path, text)), "--workdir", str(tmp_path / "run")]
    assert main(["train", *command, "--profile", f"{BASE['steps'] + 1}:99"]) == 2
    assert "step 13 comes after the run's last, 12" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert main(["train", *command, "--wandb"]) == 2
    assert "wandb is not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for wrong in ("0:3", "4:3", "x"):
        with pytest.raises(SystemExit, match="2"):
            main(["train", *command, "--profile", wrong])
        assert "is not A:B" in capsys.readouterr().err
