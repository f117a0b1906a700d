"""What processes say to each other, over pipes: points, decisions, errors and deaths."""

import json
import multiprocessing
import threading
import time

import jax
import pytest

from lm.base.errors import RunError, UsageError
from lm.parallel import processes
from lm.parallel.launcher import Group
from lm.parallel.processes import Stopped, Team

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # see Exits


class Exits:
    """Where `os._exit` leads in these tests: the thread that calls it ends, and the code is kept."""

    def __init__(self):
        self.code, self.done = None, threading.Event()

    def __call__(self, code):
        self.code = code
        self.done.set()
        raise SystemExit  # ends a thread silently


@pytest.fixture
def exits(monkeypatch):
    exits = Exits()
    monkeypatch.setattr(processes.os, "_exit", exits)
    monkeypatch.setattr(processes, "_on_abort", lambda _: None)
    monkeypatch.setattr(processes, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(processes.jax.distributed, "shutdown", lambda: None)
    return exits


@pytest.fixture
def team(exits):
    """`team(index, count, seconds)`: a process and the far ends of its connections, by peer."""
    made, ends = [], []

    def make(index, count=2, seconds=30.0):
        peers = [0] if index else range(1, count)
        pipes = {peer: multiprocessing.Pipe() for peer in peers}
        group = Group("here:1", count, index, "a test")
        made.append(processes._Several(group, {peer: near for peer, (near, _) in pipes.items()}, seconds))
        ends.append({peer: far for peer, (_, far) in pipes.items()})  # what nobody refers to would be closed
        return made[-1], ends[-1]

    yield make
    for each in made:
        each.part()


def say(connection, **message):
    connection.send_bytes(json.dumps(message).encode())


def heard(connection, name):
    """The next message with `name`; beats are passed over."""
    while connection.poll(20):
        message = json.loads(connection.recv_bytes())
        if name in message:
            return message
    raise AssertionError(f"nothing with {name} came")


def test_alone_everything_is_agreed_at_once():
    alone = Team()
    assert alone.first
    assert alone.agreed("x", 7) == 7
    alone.same("x", {"a": 1})
    with alone.first_alone("x"), alone.telling():
        pass


def test_all_get_process_0s_value_once_all_have_come(team):
    first, far = team(0, 3)
    say(far[1], at="1 start")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(first.agreed("start", [3])))
    thread.start()
    assert not far[1].poll(0.1) or "go" not in json.loads(far[1].recv_bytes())  # one is missing yet
    say(far[2], at="1 start")
    thread.join(20)
    assert answers == [[3]]
    assert heard(far[1], "go") == heard(far[2], "go") == {"go": "1 start", "value": [3]}

    other, far = team(1)
    say(far[0], go="1 start", value=[3])
    assert other.agreed("start", "mine") == [3]
    assert heard(far[0], "at") == {"at": "1 start"}


def test_a_point_that_a_living_process_does_not_reach_is_named_with_it(team):
    first, far = team(0, 4)
    say(far[2], at="1 start")
    with pytest.raises(RunError, match=r"process 0 waited 0\.5 s at 'start' for processes 1, 3"):
        first.agreed("start", seconds=0.5)
    other, _ = team(3, 4)
    with pytest.raises(RunError, match=r"process 3 waited 0\.1 s at 'start' for process 0\."):
        other.agreed("start", seconds=0.1)


def test_processes_that_come_to_different_points_are_named_at_once(team):
    first, far = team(0, 3)
    say(far[1], at="1 start")
    say(far[2], at="1 the end")
    with pytest.raises(RunError, match="process 0 has come to 'start' and process 2 to 'the end'"):
        first.agreed("start", seconds=None)


def test_what_another_process_was_given_is_compared_with_process_0s(team):
    other, far = team(1)
    say(far[0], go="1 run", value={"steps": 3, "shape": [1, 2]})
    say(far[0], go="2 run compared", value=None)
    say(far[0], go="3 run", value={"steps": 3, "shape": [1, 2]})
    other.same("run", {"steps": 3, "shape": (1, 2)})
    assert [heard(far[0], "at")["at"] for _ in range(2)] == ["1 run", "2 run compared"]  # nobody goes on before
    with pytest.raises(UsageError, match=r"process 1 was given something else than process 0: run\.steps: 3 -> 4"):
        other.same("run", {"steps": 4, "shape": (1, 2)})


@pytest.mark.parametrize(("index", "peer"), [(0, 1), (1, 0)])
def test_a_connection_that_ends_is_a_process_that_is_gone(team, exits, capsys, index, peer):
    _, far = team(index)
    far[peer].close()
    assert exits.done.wait(20)
    assert exits.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lm: process {peer} of 2 is gone")
    assert "continues from the last checkpoint" in line


@pytest.mark.parametrize(("index", "peer"), [(0, 1), (1, 0)])
def test_a_process_that_says_nothing_is_gone_too(team, exits, capsys, index, peer):
    team(index, seconds=0.3)
    assert exits.done.wait(20)
    assert exits.code == 1
    assert f"process {peer} of 2 has not been heard of for 0.3 s" in capsys.readouterr().err


def test_a_process_that_beats_is_not_gone(team, exits):
    _, far = team(0, seconds=0.5)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        say(far[1])
        assert not exits.done.wait(0.02)


def test_process_0_tells_the_others_who_is_gone_and_leaves_after_them(team, exits):
    _, far = team(0, 3)
    far[1].close()
    told = heard(far[2], "end")
    assert told["end"].startswith("process 1 of 3 is gone")
    assert told["code"] == 1
    assert not exits.done.wait(0.2)  # process 2 still needs the service in process 0
    far[2].close()
    assert exits.done.wait(20)


def test_an_error_is_told_before_anything_is_cleaned_up_and_its_code_holds_for_all(team, exits, capsys):
    other, far = team(1)
    with pytest.raises(UsageError), other.telling():
        raise UsageError("wrong", where="x")
    assert heard(far[0], "end") == {"end": "process 1 of 2 ended: x: wrong", "code": 2, "grace": 0.2}
    # The clean-up that should follow hangs: the process ends all the same.
    assert exits.done.wait(20)
    assert exits.code == 2

    exits.done.clear()
    _, far = team(0, 3)
    say(far[1], end="process 1 of 3 ended: full disk", code=1, grace=0.0)
    assert heard(far[2], "end")["end"] == "process 1 of 3 ended: full disk"
    far[1].close(), far[2].close()
    assert exits.done.wait(20)
    assert capsys.readouterr().err.splitlines()[-1] == "lm: process 1 of 3 ended: full disk"


def test_the_process_that_fails_says_its_own_line(team, exits, capsys, monkeypatch):
    other, far = team(1)

    def fail():
        with pytest.raises(SystemExit):
            other.fail(RunError("no space", where="disk"))

    threading.Thread(target=fail, daemon=True).start()
    assert heard(far[0], "end")["end"] == "process 1 of 2 ended: disk: no space"
    assert exits.done.wait(20)
    assert capsys.readouterr().err == "lm: disk: no space\n"


def test_a_collective_that_failed_because_a_peer_died_is_not_this_processes_error(team, exits, capsys):
    other, far = team(1)
    say(far[0], end="process 2 of 3 is gone", code=1, grace=0.0)
    threading.Thread(target=lambda: other.fail(jax.errors.JaxRuntimeError("Gloo: closed")), daemon=True).start()
    assert exits.done.wait(20)
    assert capsys.readouterr().err == "lm: process 2 of 3 is gone\n"


def test_stopping_together_is_no_error(team):
    other, far = team(1)
    with pytest.raises(Stopped), other.telling():
        raise Stopped
    other.part()
    while far[0].poll(0.1):
        assert "end" not in json.loads(far[0].recv_bytes())


def test_the_time_in_which_this_process_was_suspended_is_not_silence_of_the_others(team, exits, monkeypatch):
    ahead = [0.0]
    monotonic = time.monotonic
    monkeypatch.setattr(processes.time, "monotonic", lambda: monotonic() + ahead[0])
    _, far = team(0, seconds=2.0)
    far[1].recv_bytes()
    ahead[0] = 1000.0
    far[1].recv_bytes()
    assert not exits.done.wait(0.2)


def test_beats_do_not_answer_each_other(team, exits):
    _, far = team(0)
    begun, received = time.monotonic(), 0
    for _ in range(200):
        say(far[1])
        time.sleep(0.002)
        while far[1].poll(0):
            far[1].recv_bytes()
            received += 1
    assert received <= (time.monotonic() - begun) / processes._BEAT_SECONDS + 1
