"""What Slurm knows of a sweep's cells: batches as they were submitted, and the jobs that `squeue` shows of them.

A batch is written before it is submitted and gives its jobs their name. So Slurm's own list says which cell each job
trains, and nothing is submitted twice, whenever the submitting process dies.
"""

import dataclasses
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from lm.base.errors import RunError, UsageError
from lm.base.files import write_json
from lm.sweep.folder import SweepFolder, last_line

_WHOLE = -1  # the index of a job that is no array, and of an array that ended before any of its jobs began
_FIELDS = "%j|%F|%K|%T|%r"  # name, job or array id, index in the array, state, reason
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE",
          "BOOT_FAIL", "REVOKED")  # fmt: skip
_NOT_THE_CELLS = ("srun:", "slurmstepd", "submitit ")  # who else writes into a job's log


@dataclasses.dataclass(frozen=True)
class Job:
    """One cell's newest job; `id` and `state` are empty when Slurm has forgotten it."""

    id: str
    state: str
    reason: str
    log: Path | None

    @property
    def alive(self) -> bool:
        """Whether it runs or will run."""
        return bool(self.state) and self.state not in _ENDED

    @property
    def running(self) -> bool:
        """Whether it has a node."""
        return self.state in _RUNNING


def new_batch(folder: SweepFolder, name: str, cells: Sequence[str]) -> Path:
    """Makes the folder of a batch, which is also the name of its jobs: cell `i` is job `i` of the array."""
    number = 1 + max((int(batch.name.rsplit("-", 2)[1]) for batch in _batches(folder)), default=0)
    plain = re.sub(r"[^\w.-]", "_", name)  # squeue takes names apart at commas
    batch = folder.batches / f"{plain}-{number:03d}-{uuid.uuid4().hex[:8]}"
    write_json(batch / "batch.json", {"cells": list(cells)})
    return batch


def jobs(folder: SweepFolder) -> dict[str, Job]:
    """The newest job of each cell that was ever submitted.

    Raises:
      RunError: Slurm does not answer.
    """
    batches = _batches(folder)
    if not batches:
        return {}
    shown = {}
    names = ",".join(batch.name for batch in batches)
    for line in ask("squeue", "--states=all", "--array", "--noheader", f"--format={_FIELDS}", f"--name={names}"):
        name, job, task, state, reason = line.strip().split("|", 4)
        shown[name, int(task) if task.isdigit() else _WHOLE] = (job, state, reason)
    found = {}
    for batch in batches:
        cells = json.loads((batch / "batch.json").read_bytes())["cells"]
        for index, cell in enumerate(cells):
            job, state, reason = shown.get((batch.name, index)) or shown.get((batch.name, _WHOLE), ("", "", ""))
            place = f"_{index}" if len(cells) > 1 else ""
            log = next(iter(sorted(batch.glob(f"*[0-9]{place}_0_log.out"))), None)
            found[cell] = Job(f"{job}{place}" if job else "", state, reason, log)
    return found


def failure(folder: SweepFolder, cell: str, job: Job) -> str:
    """Why a job that has ended left no result, on one line."""
    how = job.state if job.state not in ("", "COMPLETED") else "the job ended without a result"
    if job.log is None and job.state != "CANCELLED":
        return f"{how}: the job wrote nothing under {folder.batches}. Is it on a file system that the nodes mount?"
    said = last_line(folder.output(cell)) or last_line(job.log, _NOT_THE_CELLS) or last_line(job.log)
    return f"{how}: {said or 'it said nothing'}"


def ask(program: str, *arguments: str) -> list[str]:
    """The lines that a program of Slurm prints.

    Raises:
      UsageError: it is not on the PATH.
      RunError: it fails.
    """
    need(program)
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RunError(told(done.stderr), where=program)
    return done.stdout.splitlines()


def need(program: str) -> None:
    """Sees that a program of Slurm can be run.

    Raises:
      UsageError: it is not on the PATH.
    """
    if shutil.which(program) is None:
        raise UsageError(f"there is no {program} on the PATH", where="Slurm", do="Go to a login node of the cluster.")


def told(stderr: str) -> str:
    """What a program of Slurm complained of, as one line without the programs' names."""
    lines = [line.split(": error: ")[-1].removeprefix("sbatch: ") for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try ")) or "it failed and said nothing"


def _batches(folder: SweepFolder) -> list[Path]:
    """Oldest first."""
    found = [record.parent for record in folder.batches.glob("*/batch.json")]
    return sorted(found, key=lambda batch: int(batch.name.rsplit("-", 2)[1]))
