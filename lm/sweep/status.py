"""How far a sweep is, read off its folder and Slurm's list without disturbing either; and how it is called off."""

import collections
import dataclasses
import enum
import json
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

import rich
import rich.box
import rich.table

from lm.base.errors import LmError, RunError
from lm.run.folder import RunFolder
from lm.run.lock import Holder, holder
from lm.sweep.folder import Listed, SweepFolder, last_line
from lm.sweep.queue import Job, ask, failure, jobs

_SAVING_SECONDS = 60.0  # that `cancel` waits for
_TAIL = 65_536  # bytes of a log that hold its last rows


class State(enum.StrEnum):
    """What is being done about a cell."""

    DONE = "done"
    RUNNING = "running"
    QUEUED = "queued"  # a job that waits, or a cell whose turn is yet to come
    FAILED = "failed"
    LEFT = "left"  # unfinished, and nobody is at it: the sweep's command goes on with it


@dataclasses.dataclass(frozen=True)
class CellStatus:
    """One cell; what is not known is None. `note` says why it failed or waits; `seconds_left` is of its steps."""

    id: str
    role: str
    n: int
    state: State
    step: int
    steps: int
    loss: float | None  # nats/token: of validation when done, else of training at `step`
    seconds_left: float | None
    job: str
    note: str


@dataclasses.dataclass(frozen=True)
class Status:
    """A whole sweep; `later` cells wait for the tune stage, `warning` says what could not be found out."""

    folder: Path
    cells: tuple[CellStatus, ...]
    later: int
    warning: str

    @property
    def totals(self) -> dict[str, int]:
        """Cells by state, and those that the tune stage holds up."""
        counts = collections.Counter(cell.state for cell in self.cells)
        return {**{state.value: counts[state] for state in State}, "later": self.later}


def status(path: Path | str) -> Status:
    """Reads how far the sweep in the folder `path` is.

    Raises:
      UsageError: it is no sweep's folder.
    """
    folder = SweepFolder(Path(path))
    listed = folder.read_list()
    known, warning = {}, ""
    try:
        known = jobs(folder)
    except LmError as error:
        warning = f"{error}; queued and running jobs are not known"
    at_work = holder(folder.path) is not None
    cells = tuple(_cell(folder, cell, known.get(cell.id), at_work) for cell in listed.cells)
    return Status(folder.path, cells, listed.later, warning)


def as_dict(found: Status) -> dict[str, Any]:
    """For `--json`."""
    return {**dataclasses.asdict(found), "folder": str(found.folder), "totals": found.totals}


def show(found: Status) -> None:
    """Prints a row a cell, then the totals."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("cell", "role", "parameters", "state", "step", "loss", "left", "job", ""):
        right = heading in ("parameters", "step", "loss", "left")
        table.add_column(heading, justify="right" if right else "left", no_wrap=bool(heading), overflow="fold")
    for cell in found.cells:
        loss = "" if cell.loss is None else f"{cell.loss:.4f}"
        left = "" if cell.seconds_left is None else _time(cell.seconds_left)
        table.add_row(cell.id, cell.role, f"{cell.n:,}", cell.state.value, f"{cell.step:,}/{cell.steps:,}", loss, left,
                      cell.job, cell.note)  # fmt: skip
    rich.print(table)
    words = [f"{count} {state}" for state, count in found.totals.items() if count and state != "later"]
    later = f"; {found.later} more follow the tune stage" if found.later else ""
    print(f"{len(found.cells)} cells: {', '.join(words)}{later}")
    if found.warning:
        print(found.warning)


def cancel(path: Path | str) -> list[str]:
    """Cancels the sweep's jobs, and tells its process on this machine to let its cells save and end.

    Returns:
      What was done, a line each; empty when nothing was going on.

    Raises:
      UsageError: it is no sweep's folder.
      RunError: Slurm does not answer, or the process is on another machine.
    """
    folder, done = SweepFolder(Path(path)), []
    folder.read_list()
    at_work = holder(folder.path)
    if at_work is not None:  # first, or it would submit the next stage
        done.append(_end(folder, at_work))
    alive = [job.id for job in jobs(folder).values() if job.alive]
    if alive:
        ask("scancel", *alive)
        done.append(f"{len(alive)} jobs cancelled")
    return done


def _end(folder: SweepFolder, at_work: Holder) -> str:
    if at_work.host != platform.node():
        raise RunError(f"{at_work} is working on this sweep", where=str(folder.path),
                       do=f"End it there first: kill {at_work.pid}")  # fmt: skip
    os.kill(at_work.pid, signal.SIGTERM)
    deadline = time.monotonic() + _SAVING_SECONDS
    while holder(folder.path) == at_work:
        if time.monotonic() > deadline:
            return f"process {at_work.pid} was told to end: its cells are still saving"
        time.sleep(0.1)
    return f"process {at_work.pid} has ended; its cells saved first"


def _cell(folder: SweepFolder, cell: Listed, job: Job | None, at_work: bool) -> CellStatus:
    run = folder.run(cell.id)
    result = _row(run.result.read_text()) if run.result.is_file() else {}
    if "loss" in result:
        return CellStatus(cell.id, cell.role, cell.n, State.DONE, cell.steps, cell.steps, result["loss"], None, "", "")
    state, note = _state(folder, cell.id, job, at_work)
    rows = [row for row in _last_rows(run.metrics) if row.get("kind") == "train"]
    step, loss = (rows[-1]["step"], rows[-1]["loss"]) if rows else (0, None)
    left = _seconds_left(run, cell.steps - step) if state is State.RUNNING else None
    number = job.id if job is not None and job.alive else ""
    return CellStatus(cell.id, cell.role, cell.n, state, step, cell.steps, loss, left, number, note)


def _state(folder: SweepFolder, cell: str, job: Job | None, at_work: bool) -> tuple[State, str]:
    if job is not None and job.alive:
        return (State.RUNNING, "") if job.running else (State.QUEUED, job.reason.replace("None", ""))
    if holder(folder.run(cell).path) is not None:
        return State.RUNNING, ""
    if folder.failure(cell).is_file():
        return State.FAILED, last_line(folder.failure(cell))
    if job is not None and job.state != "CANCELLED":
        return State.FAILED, failure(folder, cell, job)
    return (State.QUEUED, "") if at_work else (State.LEFT, "")


def _seconds_left(run: RunFolder, steps: int) -> float | None:
    for row in reversed(_last_rows(run.timing)):
        if row.get("steps"):
            return steps * row["seconds"] / row["steps"]
    return None


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows at the end of a log that somebody may be writing."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    return [row for row in map(_row, lines) if row]


def _row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
