"""A page as a headless Chromium sees it, over the DevTools protocol on a pipe."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium talks on descriptors 3 and 4, which this process may be using: a small child moves ours there.
MOVE = """
import os, sys
reading, writing = int(sys.argv[1]), int(sys.argv[2])
os.dup2(os.dup2(reading, 200), 3); os.dup2(os.dup2(writing, 201), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")


class Page:
    """One open page; `complaints` are console messages and failed loads, `requests` the addresses it asked for."""

    def __init__(self, chromium: str, profile: Path, deadline: float = 60):
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-c", MOVE, str(theirs_in), str(theirs_out), chromium, *FLAGS]
        command += [f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._deadline = time.monotonic() + deadline
        self._buffer, self._count, self._session = b"", 0, None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Loads a file and waits until it has loaded."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, a promise awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        return [event for event in self._events if event["method"] in COMPLAINTS]

    @property
    def requests(self) -> list[str]:
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; events that come before its answer are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if "method" in answer:
                self._events.append(answer)
            elif answer["id"] == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, self._deadline - time.monotonic()))
            assert ready, "chromium has not answered in time"
            part = os.read(self._in, 1 << 20)
            assert part, "chromium has gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
