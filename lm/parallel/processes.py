"""Processes that work as one: called together, kept in step, watched, and ended together.

Each process keeps one connection to process 0 beside those of JAX. Over it they gather before JAX waits for anybody,
wait for each other at named points, take process 0's decisions, and learn at once when one of them has failed or died:
a collective of JAX that has lost a peer waits for ever, or ends the process with a page of C++.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.base.config import differences
from lm.base.errors import LmError, RunError, UsageError, type_and_line
from lm.parallel.launcher import Group
from lm.parallel.rollcall import gather, named

T = TypeVar("T")

JOIN_SECONDS = 300.0
PEER_SECONDS = 120.0
POINT_SECONDS = 1800.0  # alive, and yet not at the point where the others wait
_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # for work in hand (a checkpoint that is being saved) after a peer has told of its error


class Stopped(KeyboardInterrupt):
    """All processes have agreed to stop, and have saved."""


class Team:
    """One process alone; `joined` gives the team of several.

    Every method is called by all processes, in the same order.
    """

    count, index = 1, 0

    @property
    def first(self) -> bool:
        """Whether this is process 0, which writes the files and speaks to the user."""
        return self.index == 0

    def agreed(self, name: str, value: T = None, *, seconds: float | None = POINT_SECONDS) -> T:  # type: ignore[assignment]
        """Process 0's `value` (JSON), once all processes have come to the point `name`.

        Raises:
          RunError: some process has not come within `seconds` (None: for as long as it lives), or has come to another
            point instead; the message names it.
        """
        return value

    @contextlib.contextmanager
    def first_alone(self, name: str) -> Iterator[None]:
        """The block runs in process 0, however long it takes, and then in all others, which may find what it left."""
        if not self.first:
            self.agreed(name, seconds=None)
        yield
        if self.first:
            self.agreed(name)

    def same(self, name: str, value: Any) -> None:
        """Sees that all processes were given the same plain `value`, before any goes on.

        Raises:
          UsageError: this one's differs from process 0's; each difference is listed.
        """
        changed = differences(self.agreed(name, value), json.loads(json.dumps(value)), name)
        if changed:
            raise UsageError(
                f"process {self.index} was given something else than process 0: " + "; ".join(changed[:5]),
                do="Start all processes with the same command, code and texts.",
            )
        self.agreed(f"{name} compared")

    def compiled(self, function: Any, *arguments: Any) -> None:
        """Compiles `function` (anything with JAX's `lower`) for `arguments` in every process before any calls it.

        The first call of a collective waits for the other processes as well, and not for as long as they may compile:
        30 s on CPUs.
        """

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An error in the block is told to the other processes at once, before anything around it is cleaned up."""
        yield


class Vote:
    """Whether any process says yes: asked of all after every step, answered one call later so that no device waits.

    One process alone is answered at once.
    """

    def __init__(self, team: Team, mesh: Mesh):
        self._alone, self._size = team.count == 1, mesh.size
        self._votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: Any = False
        team.compiled(self._any, self._cast(False))

    def __call__(self, yes: bool) -> bool:
        if self._alone:
            return yes
        answer, self._asked = self._asked, self._any(self._cast(yes))
        return bool(answer)

    def _cast(self, yes: bool) -> jax.Array:
        return jax.make_array_from_callback((self._size,), self._votes, lambda _: np.array([yes]))


@contextlib.contextmanager
def joined(
    group: Group | None, *, join_seconds: float = JOIN_SECONDS, peer_seconds: float = PEER_SECONDS
) -> Iterator[Team]:
    """The team of `group` (None: this process alone), with JAX initialised over all of it; before any use of JAX.

    When the block ends well, or with `Stopped`, all processes end together. When it fails in one, the others end with
    its message and exit code; a process that has died ends them with exit code 1. Where several processes are at work,
    this function does not return then, since what JAX and Orbax would wait for at exit will not come.

    Args:
      join_seconds: until every process must have come.
      peer_seconds: without a word from a process until it counts as dead. One whose machine lives is missed at once.

    Raises:
      RunError: processes are missing, or another count or version of JAX is expected by one of them.
    """
    if group is None:
        yield Team()
        return
    print(
        f"waiting for {group.count} processes at {group.coordinator}, I am {group.index}; up to {join_seconds:g} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    team = _Several(group, gather(group, join_seconds), peer_seconds)
    stopped = None
    try:
        _start_jax(group, join_seconds, peer_seconds)
        try:
            yield team
        except Stopped as error:
            stopped = error
        team.agreed("the end")
    except BaseException as error:  # noqa: BLE001 - whatever it is, the others must not wait for this process
        team.fail(error)
    team.part()
    if stopped:
        raise stopped


def _start_jax(group: Group, join_seconds: float, peer_seconds: float) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        group.coordinator,
        group.count,
        group.index,
        local_device_ids=group.device,
        cluster_detection_method="deactivate",  # it would give a process one GPU even where it is alone on its machine
        initialization_timeout=int(join_seconds),
        heartbeat_timeout_seconds=int(3 * peer_seconds),  # behind ours: its way to end a process is to abort it
        shutdown_timeout_seconds=int(peer_seconds),
    )


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """Why this process will end, and when."""

    line: str
    code: int
    at: float


class _Several(Team):
    """A process of a team; its thread listens, says that this process lives, and ends it when a verdict is due."""

    def __init__(self, group: Group, peers: dict[int, Connection], peer_seconds: float):
        self.count, self.index = group.count, group.index
        self._peers, self._peer_seconds = peers, peer_seconds
        self._silent = dict.fromkeys(peers, 0.0)  # seconds since a word
        self._points: dict[int, str] = {}  # where each peer waits
        self._decided: dict[str, Any] = {}  # what process 0 said at each point
        self._passed = 0
        self._news, self._sending = threading.Condition(), threading.Lock()
        self._verdict: _Verdict | None = None
        self._parted = False
        self._abort_hook = _on_abort(self._aborted)
        threading.Thread(target=self._watch, name="lm-team", daemon=True).start()

    def agreed(self, name: str, value: T = None, *, seconds: float | None = POINT_SECONDS) -> T:  # type: ignore[assignment]
        self._passed += 1
        point = f"{self._passed} {name}"
        absent = self._absent if self.first else self._undecided
        if not self.first:
            self._send(0, {"at": point})
        with self._news:
            come = self._news.wait_for(lambda: self._strayed(point) or not absent(point), seconds)
            if strayed := self._strayed(point):
                raise RunError(
                    f"process 0 has come to '{name}' and {named(list(strayed))} to {', '.join(strayed.values())}",
                    do="Start all processes with the same command, code and files.",
                )
            if not come:
                raise RunError(
                    f"process {self.index} waited {seconds:g} s at '{name}' for {named(absent(point))}",
                    do="It lives and does something else: look at what it says.",
                )
            if not self.first:
                return self._decided.pop(point)
        for peer in list(self._peers):
            self._send(peer, {"go": point, "value": value})
        return value

    def compiled(self, function: Any, *arguments: Any) -> None:
        function.lower(*arguments).compile()
        self.agreed("compilation")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the others of `error`, says it here, and ends this process."""
        ours = self._tell(error)
        if ours and not isinstance(error, (LmError, OSError, KeyboardInterrupt)):
            traceback.print_exception(error)
        with self._news:
            assert self._verdict is not None
            line = _explained(error)[0] if ours else self._verdict.line
            self._verdict = _Verdict(line, self._verdict.code, time.monotonic())
        while True:
            time.sleep(_BEAT_SECONDS)  # the watch ends the process

    def part(self) -> None:
        """Ends the watch, and JAX's service, when all have come to the end."""
        self._parted = True
        _on_abort(None)
        with contextlib.suppress(RuntimeError):  # nothing is left to lose
            jax.distributed.shutdown()

    def _absent(self, point: str) -> list[int]:
        return [peer for peer in range(1, self.count) if self._points.get(peer) != point]

    def _strayed(self, point: str) -> dict[int, str]:
        """Peers that wait at another point of the same number, which none of the others will come to."""
        count, _, name = point.partition(" ")
        at = {peer: theirs.partition(" ") for peer, theirs in self._points.items()}
        return {peer: f"'{other}'" for peer, (passed, _, other) in at.items() if passed == count and other != name}

    def _undecided(self, point: str) -> list[int]:
        return [] if point in self._decided else [0]

    def _tell(self, error: BaseException) -> bool:
        """Makes `error` the verdict, and says whether it is."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            with self._news:  # where a peer has died, the collective that failed is not this process's error
                self._news.wait_for(lambda: self._verdict is not None, 5 * _BEAT_SECONDS)
        line, code = _explained(error)
        told = f"process {self.index} of {self.count} ended: {line}"
        self._condemn(told, code, _GRACE_SECONDS)
        return self._verdict is not None and self._verdict.line == told

    def _condemn(self, line: str, code: int, grace: float) -> None:
        """The first verdict holds; all learn of it from or through process 0."""
        with self._news:
            if self._verdict is not None:
                return
            self._verdict = _Verdict(line, code, time.monotonic() + grace)
            self._news.notify_all()
        for peer in list(self._peers):
            self._send(peer, {"end": line, "code": code, "grace": grace})

    def _watch(self) -> None:
        beaten = time.monotonic()
        while not self._parted:
            for connection in wait(list(self._peers.values()), _BEAT_SECONDS):
                self._hear(next(peer for peer, known in self._peers.items() if known is connection))
            now = time.monotonic()
            if now - beaten >= _BEAT_SECONDS:
                # While this process was suspended itself, it could hear nobody.
                passed, beaten = min(now - beaten, 3 * _BEAT_SECONDS), now
                for peer in list(self._peers):
                    self._send(peer, {})
                    self._silent[peer] += passed
                    if self._silent[peer] > self._peer_seconds:
                        self._miss(peer, f"has not been heard of for {self._peer_seconds:g} s")
            if self._verdict is not None and self._due(self._verdict):
                print(f"lm: {self._verdict.line}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(self._verdict.code)  # finalisers would wait for those who have gone

    def _due(self, verdict: _Verdict) -> bool:
        # Process 0 goes last: JAX aborts every process that has lost the service in it.
        late = time.monotonic() - verdict.at
        return late >= 0 and (not self.first or not self._peers or late > self._peer_seconds)

    def _hear(self, peer: int) -> None:
        try:
            message = json.loads(self._peers[peer].recv_bytes())
        except (EOFError, OSError):
            self._miss(peer, "is gone")
            return
        self._silent[peer] = 0.0
        if "end" in message:
            self._condemn(message["end"], message["code"], message["grace"])
        with self._news:
            if "at" in message:
                self._points[peer] = message["at"]
            if "go" in message:
                self._decided[message["go"]] = message["value"]
            self._news.notify_all()

    def _miss(self, peer: int, how: str) -> None:
        del self._peers[peer]
        if self._parted:
            return
        if peer == 0 and self._verdict is None:
            time.sleep(_BEAT_SECONDS)  # what JAX says of the service that it has lost comes before our line
        self._condemn(
            f"process {peer} of {self.count} {how}: it ended, or its machine or network did. The same command on all "
            "machines continues from the last checkpoint.",
            1,
            0.0,
        )

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        connection = self._peers.get(peer)
        with contextlib.suppress(OSError), self._sending:  # a connection that has ended is the watch's business
            if connection is not None:
                connection.send_bytes(json.dumps(message).encode())

    def _aborted(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._verdict is not None, 3 * _BEAT_SECONDS)
        self._condemn(f"JAX has ended process {self.index} of {self.count}, and says there why", 1, 0.0)
        while True:
            time.sleep(_BEAT_SECONDS)  # the watch ends the process


def _on_abort(act: Callable[[], None] | None) -> Any:
    """Calls `act`, which must not return, when C++ aborts this process: JAX does when it has lost process 0.

    Python's own signal handlers would run after the abort, that is never. The result must be kept: C does not.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    hook = kind(lambda _: act()) if act is not None else kind(0)
    ctypes.CDLL(None).signal(signal.SIGABRT, hook)
    return hook


def _explained(error: BaseException) -> tuple[str, int]:
    """One line and the exit code."""
    if isinstance(error, LmError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, OSError):
        return str(RunError(error.strerror or str(error), where=str(error.filename or ""))), 1
    return type_and_line(error), 1
