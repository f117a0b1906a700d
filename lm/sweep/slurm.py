"""Cells as jobs of a Slurm cluster: an array of jobs, a cell each, on one node or several."""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lm.base.errors import RunError, UsageError
from lm.base.progress import console
from lm.sweep import job
from lm.sweep.folder import SweepFolder
from lm.sweep.launch import Outcome, cache_settings, write_order
from lm.sweep.plan import Planned
from lm.sweep.queue import failure, jobs, need, new_batch, told

LONGEST_PAUSE = 15.0  # seconds between two questions to Slurm; the first come faster
WARNING_SECONDS = 120  # before its time limit a job is told to save
_OURS = ("array", "job-name", "output", "error", "open-mode", "wrap", "wait", "parsable", "test-only")
_FLAGS = {"partition": "--partition", "account": "--account", "time": "--time", "nodes": "--nodes-per-cell",
          "gpus-per-node": "--gpus-per-node"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slurm:
    """Starts cells as Slurm jobs; what is None is left to the cluster.

    Args:
      time: limit of a job, as sbatch takes it; a job that reaches it saves, is queued again and continues.
      gpus_per_node: as sbatch takes it, e.g. "4" or "h100:4".
      nodes_per_cell: nodes of a job, one process on each.
      max_parallel: jobs at once.
      options: further options of sbatch, `key=value` or `key`.

    Raises:
      UsageError: submitit or sbatch is missing, or an option is not one's to give.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus_per_node: str | None = None
    nodes_per_cell: int = 1
    max_parallel: int | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag, count in (("--nodes-per-cell", self.nodes_per_cell), ("--max-parallel", self.max_parallel)):
            if count is not None and count < 1:
                raise UsageError(f"{count} is less than 1", where=flag)
        self._options()
        need("sbatch")
        _submitit()

    def outlook(self, cells: Sequence[Planned]) -> str:
        """How many jobs run at once: nothing is known of the nodes' speed."""
        return f"a Slurm job each, {self.max_parallel or 'all'} at once where nodes are free"

    def run(self, folder: SweepFolder, name: str, cells: Sequence[Planned]) -> Iterator[Outcome]:
        """Submits the cells that have no job yet, the costliest first, and yields each cell as its job ends.

        Jobs go on when the caller stops iterating or is interrupted.

        Raises:
          UsageError: Slurm refuses the jobs.
          RunError: Slurm does not answer, and no job was submitted.
        """
        known = jobs(folder)
        ordered = sorted(cells, key=lambda cell: -cell.flops)
        new = [cell for cell in ordered if cell.id not in known or not known[cell.id].alive]
        if len(new) < len(ordered):
            console.print(f"{len(ordered) - len(new)} cells are queued or running already")
        if new:
            self._submit(folder, name, new)
        try:
            yield from _wait(folder, {cell.id: cell for cell in ordered})
        except (KeyboardInterrupt, GeneratorExit):
            console.print(f"Jobs stay in Slurm's queue: `lm status {folder.path}` shows them, "
                          f"`lm cancel {folder.path}` ends them.", highlight=False, soft_wrap=True)  # fmt: skip
            raise

    def _submit(self, folder: SweepFolder, name: str, cells: Sequence[Planned]) -> None:
        submitit = _submitit()
        batch = new_batch(folder, name, [cell.id for cell in cells])
        orders = [str(write_order(folder, name, cell)) for cell in cells]
        executor = submitit.SlurmExecutor(batch)
        executor.update_parameters(
            job_name=batch.name,
            partition=self.partition,
            account=self.account,
            time=self.time,
            gpus_per_node=self.gpus_per_node,
            nodes=self.nodes_per_cell,
            ntasks_per_node=1,
            array_parallelism=self.max_parallel or len(cells),
            signal_delay_s=WARNING_SECONDS,
            setup=_setup(folder),
            stderr_to_stdout=True,
            wckey=None,
            additional_parameters={"requeue": True, **self._options()},
        )
        try:
            with _outside_any_job(), contextlib.redirect_stderr(io.StringIO()):
                executor.map_array(job.run, orders)
        except submitit.core.utils.FailedJobError as error:
            shutil.rmtree(batch)
            raise UsageError(told(str(error)), where="sbatch", do="No job was submitted.") from None

    def _options(self) -> dict[str, Any]:
        """`options` under the names that submitit turns into flags of sbatch.

        Raises:
          UsageError: one has another flag, is needed here, or is no `key=value`.
        """
        found: dict[str, Any] = {}
        for option in self.options:
            key, equals, value = option.removeprefix("--").partition("=")
            key = key.replace("_", "-")
            if not re.fullmatch(r"[a-z][a-z-]*", key) or "\n" in value:
                raise UsageError(
                    f"'{option}' is no option of sbatch", where="--slurm", do="Write key=value, e.g. qos=low."
                )
            if key in _FLAGS:
                raise UsageError(f"'{key}' has a flag of its own", where="--slurm", do=f"Use {_FLAGS[key]}.")
            if key in _OURS:
                raise UsageError(f"'{key}' is set for every sweep", where="--slurm", do="Leave it out.")
            found[key.replace("-", "_")] = value if equals else True
        return found


def _wait(folder: SweepFolder, waiting: dict[str, Planned]) -> Iterator[Outcome]:
    ended: set[str] = set()
    begun, silent = time.monotonic(), False
    while waiting:
        try:
            known = jobs(folder)
            silent = False
        except RunError as error:  # a busy controller: it is asked again
            if not silent:
                console.print(f"{error}; trying on", highlight=False)
            known, silent = {}, True
        for cell in [cell for cell in waiting if cell in known]:
            if folder.finished(cell):
                yield Outcome(waiting.pop(cell), "")
            elif known[cell].alive:
                ended.discard(cell)
            elif cell not in ended:  # looked for again: a shared file system may show the result later
                ended.add(cell)
            else:
                yield Outcome(waiting.pop(cell), failure(folder, cell, known[cell]))
        if waiting:
            time.sleep(min(LONGEST_PAUSE, 0.5 + 0.05 * (time.monotonic() - begun)))


def _setup(folder: SweepFolder) -> list[str]:
    """Lines of the batch script before srun."""
    cache = [f"export {name}={shlex.quote(value)}" for name, value in cache_settings(folder).items()]
    # Since Slurm 22.05 srun does not take over what the job was given.
    return [*cache, '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"']


@contextlib.contextmanager
def _outside_any_job() -> Iterator[None]:
    """What Slurm says to this process of a job that it runs in is not passed on to the jobs that it submits."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    settings = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with _submitit().helpers.clean_env():
        os.environ.update(settings)
        yield


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise UsageError("needs the package submitit", where="--launcher slurm",
                         do="pip install -e '.[slurm]' -c constraints.txt") from None  # fmt: skip
    return submitit
