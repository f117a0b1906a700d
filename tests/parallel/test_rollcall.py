"""The roll call over real sockets: all come, or the message says who did not and who expects something else."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm.base.errors import LmError, RunError, UsageError
from lm.cli import main
from lm.parallel.launcher import Group
from lm.parallel.rollcall import gather


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def called(address, *parts, seconds=20.0):
    """What `gather` gives each (index, count) of `parts`, or its error."""

    def one(part):
        index, count = part
        try:
            return gather(Group(address, count, index, "a test"), seconds)
        except LmError as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, parts))


def test_all_come_and_each_can_speak_with_process_0(address):
    found = called(address, (2, 3), (0, 3), (1, 3))
    last, first, second = found
    assert sorted(first) == [1, 2]
    for index, peer in ((1, second), (2, last)):
        peer[0].send_bytes(b"%d" % index)
        assert first[index].recv_bytes() == b"%d" % index
    # The port is free again, for JAX, while these connections are open.
    with socket.create_server(("", int(address.rpartition(":")[2])), reuse_port=False):
        pass


def test_who_is_missing_is_told_to_all(address):
    missing = "processes 1, 3 of 4 did not come within 1 s"
    first, other = called(address, (0, 4), (2, 4), seconds=1.0)
    assert isinstance(first, RunError)
    assert isinstance(other, RunError)
    assert missing in str(first)
    assert f"process 0 has ended the wait: {address}: {missing}" in str(other)


@pytest.mark.parametrize(("part", "words"), [((1, 3), "process 1 says .*3.* and process 0 says .*2"),
                                             ((7, 9), "process 7 says .*9.* and process 0 says .*2")])  # fmt: skip
def test_another_count_is_refused_at_once_on_both_sides(address, part, words):
    for error in called(address, (0, 2), part):
        assert isinstance(error, UsageError)
        assert re.search(words, str(error)), error


def test_two_of_the_same_number_are_refused(address):
    found = called(address, (0, 3), (1, 3), (1, 3))
    assert all("two processes say that they are process 1" in str(error) for error in found)


def test_a_stranger_at_the_port_is_passed_over(address):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(called, address, (0, 2))
        host, _, port = address.partition(":")
        stranger = None
        while stranger is None:
            try:
                stranger = socket.create_connection((host, int(port)))
            except OSError:
                assert not first.done()
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        (other,) = called(address, (1, 2))
        assert sorted(other) == [0]
        assert sorted(first.result()[0]) == [1]
        stranger.close()


def test_a_missing_peer_ends_the_command_with_one_line(address, tmp_path, capsys):
    from tests.train.tiny import config_file, corpus

    command = ["train", "--config", str(config_file(tmp_path, corpus(tmp_path))), "--workdir", str(tmp_path / "run"),
               "--coordinator", address, "--processes", "3", "--join-timeout", "1", "--process"]  # fmt: skip
    for index, words in (
        ("0", "processes 1, 2 of 3 did not come within 1 s"),
        ("1", "process 0 of 3 did not answer within 1 s"),
    ):
        assert main([*command, index]) == 1
        first, last = capsys.readouterr().err.splitlines()
        assert first == f"waiting for 3 processes at {address}, I am {index}; up to 1 s"
        assert last.startswith(f"lm train: {address}: {words}")
        assert "--join-timeout" in last
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_said(address):
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        (error,) = called(address, (0, 2))
    assert "process 0 cannot listen there" in str(error)


def test_wrong_seconds_are_refused(capsys):
    for wrong in ("0", "-1", "x", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", "--checkpoint", "x", "--text", "y", "--join-timeout", wrong])
        assert "is not a whole number, at least 1" in capsys.readouterr().err
