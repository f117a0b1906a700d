"""The command itself: every subcommand helps with an example, and wrong requests cost one line."""

import signal
import subprocess
import sys

import pytest

from lm.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"example:\n  {COMMANDS[command][1]}" in printed


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["trian"], 2), (["fit"], 2), (["train", "--workdri", "x"], 2)])
def test_a_misspelled_request_exits_with_2(argv, code, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code
    assert "usage: lm" in capsys.readouterr().err


def test_overrides_without_a_config_are_refused(capsys):
    assert main(["predict", "--fit", "fit.json", "--n", "1", "--d", "1", "--config.steps=3"]) == 2
    assert "nothing to override" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "told"), [(OSError(5, "Input/output error", "a.txt"), "a.txt: Input/output error"),
                                             (OSError("odd"), "odd")])  # fmt: skip
def test_an_error_of_the_system_is_one_line_and_exit_code_1(monkeypatch, capsys, error, told):
    def declare(parser):
        """Fails."""

        def run(args):
            raise error

        return run

    monkeypatch.setitem(COMMANDS, "fail", (declare, "lm fail"))
    assert main(["fail"]) == 1
    assert capsys.readouterr().err == f"lm fail: {told}\n"


def test_help_needs_neither_jax_nor_pandas():
    code = "import sys, lm.cli; lm.cli._parser(); print(sorted({'jax', 'flax', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_run_that_is_stopped_before_it_begins_is_one_line_and_130(number, tmp_path, capsys):
    config = tmp_path / "stopped.py"
    config.write_text(
        f"import os, time\ndef get_config(arg):\n    os.kill(os.getpid(), {int(number)})\n    time.sleep(60)\n"
    )
    assert main(["train", "--config", str(config), "--workdir", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == "lm train: interrupted. The same command continues where it stopped.\n"
    assert not (tmp_path / "run").exists()
