"""One cell as a Slurm job: what submitit calls on a node, once for each process of the cell."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from lm.run.checkpoint import latest_step
from lm.run.folder import RunFolder
from lm.sweep.cell import carry_out, read_order
from lm.sweep.folder import SweepFolder


def run(order_file: str) -> None:
    """Carries out an order, and queues the job again when its time limit stopped it after some progress.

    Slurm stops a job with SIGTERM (preemption, requeue, cancellation: it queues the job again itself where it means
    to), or warns it with SIGUSR2 (its time limit is near). The run saves a checkpoint after either and ends with 0:
    Slurm was obeyed, nothing has failed.

    Raises:
      SystemExit: always, with 0 or the exit code of `lm train`; submitit then adds no word and no result of its own.
    """
    order, process = read_order(Path(order_file)), int(os.environ.get("SLURM_PROCID", "0"))
    run_folder = RunFolder(Path(order.workdir))
    _say_into(SweepFolder(run_folder.path.parent).output(run_folder.path.name, process))
    warned: list[int] = []

    def warn(number: int, _: FrameType | None) -> None:
        warned.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    # submitit's own handlers would requeue without a checkpoint, ignore SIGTERM, and have a last word on SIGCONT.
    signal.signal(signal.SIGUSR2, warn)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    before = latest_step(run_folder.checkpoints)
    code = carry_out(order)
    if code == 130:
        code = 0
        if warned and process == 0:
            code = _requeue() if latest_step(run_folder.checkpoints) != before else _refuse()
    raise SystemExit(code)


def _say_into(path: Path) -> None:
    """Everything that this process says from now on is appended to a file: a job that is queued again goes on there."""
    with open(path, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def _refuse() -> int:
    print("the time limit came before the first new checkpoint: give the jobs more --time", file=sys.stderr)
    return 1


def _requeue() -> int:
    # Slurm ends this process for it, as any other of the job.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = os.environ["SLURM_JOB_ID"]
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    try:
        subprocess.run(["scontrol", "requeue", f"{array}_{index}" if array else job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"stopped by the time limit, and not queued again: {error}", file=sys.stderr)
        return 1
    print("stopped by the time limit: queued again", file=sys.stderr)
    return 0
