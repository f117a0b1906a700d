"""The roll call before JAX waits for anybody: who is missing, or expects something else, is said in one line."""

import importlib.metadata
import json
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from lm.base.errors import LmError, RunError, UsageError
from lm.parallel.launcher import Group

_HELLO_SECONDS, _HELLO_BYTES, _RETRY_SECONDS = 5.0, 4096, 0.2


def gather(group: Group, seconds: float) -> dict[int, Connection]:
    """Waits until every process of `group` has come, and returns this one's connections by process.

    Process 0 has one to each other process, and any other only that to process 0. Nothing but JSON goes over them.

    Raises:
      RunError: processes are missing after `seconds`, or process 0 cannot listen.
      UsageError: a process expects another count or has another version of JAX, or two say that they are the same.
    """
    return _called(group, seconds) if group.index == 0 else _report(group, seconds)


def named(indices: list[int]) -> str:
    """Processes as a message names them."""
    return f"process{'es' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def _called(group: Group, seconds: float) -> dict[int, Connection]:
    """Process 0's part of the roll call: a connection to each other process, all of them told that all are here."""
    until, ours = time.monotonic() + seconds, _hello(group)
    peers: dict[int, Connection] = {}
    heard: list[Connection] = []
    try:
        with _server(group) as server:
            while len(peers) < group.count - 1:
                server.settimeout(max(until - time.monotonic(), 0.01))
                try:
                    connection = _connection(server.accept()[0])
                except TimeoutError:
                    absent = [peer for peer in range(1, group.count) if peer not in peers]
                    raise RunError(
                        f"{named(absent)} of {group.count} did not come within {seconds:g} s",
                        where=group.coordinator,
                        do="Start every process, let them reach this address, or give --join-timeout more seconds.",
                    ) from None
                theirs = _received(connection, _HELLO_SECONDS)
                if theirs is None or "index" not in theirs:
                    continue  # a stranger
                heard.append(connection)
                peer = theirs.pop("index")
                if theirs != ours or peer in peers or not 0 < peer < group.count:
                    told = f"process {peer} says {theirs} and process 0 says {ours}"
                    raise UsageError(f"two processes say that they are process {peer}" if theirs == ours else told,
                                     where=group.coordinator, do="Start all with the same command.")  # fmt: skip
                peers[peer] = connection
    except LmError as error:
        for connection in heard:
            connection.send_bytes(json.dumps({"refused": str(error), "code": error.exit_code}).encode())
        raise
    for connection in peers.values():
        connection.send_bytes(json.dumps({"refused": None}).encode())
    return peers


def _report(group: Group, seconds: float) -> dict[int, Connection]:
    """The part of any other process: its connection to process 0, once all are here."""
    until, why = time.monotonic() + seconds, "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = _connection(socket.create_connection(group.address, timeout=min(left, _HELLO_SECONDS)))
            connection.send_bytes(json.dumps({"index": group.index, **_hello(group)}).encode())
            # Process 0 may have begun to wait later, and it knows better who is missing.
            answer = _received(connection, left + seconds)
        except OSError as error:
            answer, why = None, str(error)
        if answer is None or "refused" not in answer:
            time.sleep(_RETRY_SECONDS)
            continue
        if answer["refused"] is None:
            return {0: connection}
        kind = UsageError if answer["code"] == UsageError.exit_code else RunError
        raise kind(f"process 0 has ended the wait: {answer['refused']}")
    raise RunError(
        f"process 0 of {group.count} did not answer within {seconds:g} s ({why})",
        where=group.coordinator,
        do="Start it, let this machine reach that port, or give --join-timeout more seconds.",
    )


def _hello(group: Group) -> dict[str, Any]:
    return {"processes": group.count, "jax": importlib.metadata.version("jax")}


def _server(group: Group) -> socket.socket:
    # JAX listens at the same port after this: the option lets it while our connections are open.
    port = group.address[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=group.count)
        return socket.create_server(("", port), backlog=group.count)
    except OSError as error:
        raise RunError(
            f"process 0 cannot listen there: {error.strerror}", where=group.coordinator, do="Name a free port."
        ) from error


def _connection(link: socket.socket) -> Connection:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(link.detach())


def _received(connection: Connection, seconds: float) -> dict[str, Any] | None:
    try:
        found = json.loads(connection.recv_bytes(_HELLO_BYTES)) if connection.poll(seconds) else None
    except (EOFError, OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
