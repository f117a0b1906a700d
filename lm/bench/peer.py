"""Peers as long-lived processes: started once, then told to run k steps whenever it is their turn."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from flax import traverse_util

from lm.base import freed
from lm.base.errors import UsageError

_PEERS = Path(__file__).parent / "peers"
_SETUP_SECONDS, _RUN_SECONDS = 600.0, 300.0


class PeerMissing(Exception):
    """A peer that could not take part; the text is the reason that is shown in its place."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A program to measure against: `program` is a file of `lm/bench/peers` (or a path), `spec` what it is told.

    `python` is the interpreter; None stands for one that was looked for and not found, with `reason` why.
    """

    name: str
    program: str | Path
    python: str | None
    spec: Mapping[str, Any]
    reason: str = ""


class RunningPeer:
    """A peer's process, which is setting itself up; `facts` is what it says of itself once it is `ready`."""

    def __init__(self, process: subprocess.Popen, errors: IO[bytes]):
        self._process, self._errors = process, errors
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self) -> dict[str, Any]:
        """Waits until it is set up and returns its facts.

        Raises:
          PeerMissing: a library that does not import or a set-up that failed, in one line; or it fell silent.
        """
        self.facts = _answer(self._process, self._errors, _SETUP_SECONDS)["facts"]
        return self.facts

    def run(self, steps: int) -> float:
        """Seconds that `steps` steps took, on its own clock.

        Raises:
          PeerMissing: it failed or fell silent.
        """
        _request(self._process, self._errors, {"run": steps})
        return _answer(self._process, self._errors, _RUN_SECONDS)["seconds"]


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[RunningPeer]:
    """Starts a peer and tells it to set itself up, without waiting for that; it ends with the block.

    Raises:
      PeerMissing: there is no interpreter, or it does not start.
    """
    if peer.python is None:
        raise PeerMissing(peer.reason)
    command = [peer.python, str(_PEERS / "serve.py"), str(_PEERS / peer.program)]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env={**os.environ, **freed.environment()},  # as our own side, so that it is no advantage
            )
        except OSError as error:
            raise PeerMissing(f"its interpreter does not start: {error.strerror}") from error
        try:
            _request(process, errors, {"setup": dict(peer.spec)})
            yield RunningPeer(process, errors)
        finally:
            _end(process)


def find_python(asked: str | None, module: str) -> tuple[str | None, str]:
    """An interpreter that holds `module`, or None and the reason.

    `asked` is taken at its word (the peer itself then says what it lacks). Without it the environments `.venv*` of
    this folder are tried, then the current interpreter.

    Raises:
      UsageError: `asked` is not a program.
    """
    if asked is not None:
        if not os.access(asked, os.X_OK) or os.path.isdir(asked):
            raise UsageError("is not an interpreter", where=f"--peer-python {asked}", do="Pass a path to python.")
        return asked, ""
    for python in sorted(Path.cwd().glob(".venv*/bin/python")):
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if subprocess.run([python, "-c", probe], capture_output=True, timeout=60).returncode == 0:
                return str(python), ""
    if importlib.util.find_spec(module) is not None:
        return sys.executable, ""
    extra = "make one with the extra 'parity' (Python 3.11), or pass --peer-python"
    return None, f"no interpreter with {module}: neither .venv*/bin/python nor this one has it; {extra}"


def save_start(path: Path, params: Any, **arrays: Any) -> None:
    """Writes what everyone starts from: `arrays` and, as "params/<path>", our parameters."""
    flat = traverse_util.flatten_dict(params, sep="/")
    named: dict[str, Any] = {f"params/{name}": np.asarray(value) for name, value in flat.items()}
    np.savez(path, **arrays, **named)


def _request(process: subprocess.Popen, errors: IO[bytes], request: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
    except OSError as error:
        raise PeerMissing(_last_words(process, errors)) from error


def _answer(process: subprocess.Popen, errors: IO[bytes], seconds: float) -> dict[str, Any]:
    assert process.stdout is not None
    line, until = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            raise PeerMissing(f"no answer within {seconds:.0f} s")
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            raise PeerMissing(_last_words(process, errors))
        line += part
    answer = json.loads(line)
    if "error" in answer:
        raise PeerMissing(answer["error"])
    return answer


def _last_words(process: subprocess.Popen, errors: IO[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"ended with code {process.returncode}" + (f": {lines[-1][:300]}" if lines else "")


def _end(process: subprocess.Popen) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
