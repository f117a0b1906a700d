"""Peers: own processes, real turns, and a reason for each that is missing."""

import sys
from pathlib import Path

import pytest

from lm.base.errors import UsageError
from lm.base.progress import bar
from lm.bench.interleave import interleave
from lm.bench.machine import Meter
from lm.bench.peer import Peer, PeerMissing, find_python, running

STUB = Path(__file__).parent / "stub.py"


def stub(log: Path, name: str = "peer", python: str | None = sys.executable, **spec) -> Peer:
    return Peer(name, STUB, python, {"name": name, "log": str(log), **spec}, reason="" if python else "none was found")


def measure(log: Path, peers: list[Peer], rounds: int = 3, **options):
    def ours(count: int) -> float:
        with log.open("a") as file:
            file.write(f"ours {count}\n")
        return 0.002 * count

    with bar("test", 1, shown=False) as progress:
        return interleave({"ours": ours}, peers, rounds=rounds, steps=2, meter=Meter(), progress=progress, **options)


def test_turns_alternate(tmp_path):
    log = tmp_path / "log"
    taken = measure(log, [stub(log, "first"), stub(log, "second")])
    assert log.read_text().splitlines() == ["ours 2", "first 2", "second 2"] * 3
    assert {name: len(samples) for name, samples in taken.seconds.items()} == {"ours": 3, "first": 3, "second": 3}
    assert taken.seconds["ours"] == [0.002] * 3
    assert min(taken.seconds["first"]) >= 0.001  # a sleep of 1 ms a step is never shorter
    assert taken.missing == {}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"python": None}, "none was found"),
        ({"python": "/nowhere/python"}, "interpreter does not start"),
        ({"fail": "setup"}, "ModuleNotFoundError: No module named 'torch'"),
        ({"fail": "run"}, "ended with code 3"),
    ],
)
def test_a_peer_that_cannot_take_part_is_named_with_the_reason_and_the_others_go_on(tmp_path, made, reason):
    log = tmp_path / "log"
    taken = measure(log, [stub(log, "broken", **made), stub(log, "sound")])
    assert list(taken.missing) == ["broken"]
    assert reason in taken.missing["broken"]
    assert "\n" not in taken.missing["broken"]
    assert sorted(taken.seconds) == ["ours", "sound"]
    assert len(taken.seconds["sound"]) == 3


def test_a_peer_that_computes_something_else_is_refused(tmp_path):
    log = tmp_path / "log"
    taken = measure(log, [stub(log, loss=2.0)], accept=lambda peer, facts: f"loss {facts['loss']}")
    assert taken.missing == {"peer": "loss 2.0"}
    assert "peer" not in log.read_text()


def test_the_process_ends_with_the_block(tmp_path):
    with running(stub(tmp_path / "log")) as started:
        folder = Path(f"/proc/{started.pid}")
        assert folder.exists() or not Path("/proc").exists()
    assert not folder.exists()


def test_a_program_that_is_not_there_is_a_reason(tmp_path):
    peer = Peer("gone", tmp_path / "gone.py", sys.executable, {})
    with running(peer) as started, pytest.raises(PeerMissing, match=r"gone\.py"):
        started.ready()


def test_an_interpreter_that_was_asked_for_must_be_one(tmp_path):
    with pytest.raises(UsageError, match="--peer-python"):
        find_python(str(tmp_path), "torch")


def test_without_any_interpreter_the_reason_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python, reason = find_python(None, "a_library_that_nobody_has")
    assert python is None
    assert "--peer-python" in reason


def test_an_environment_of_the_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / ".venv-3.11" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv-3.11" / "bin" / "python"
    python.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert find_python(None, "json") == (str(python), "")
