"""Which process this is and of how many: told by flags, or found in what a launcher left in the environment."""

import dataclasses
import os
import zlib
from collections.abc import Mapping

from lm.base.errors import UsageError

_PORTS = (61440, 4096)  # first and count of those that are chosen from where nothing names one


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that will work as one.

    Raises:
      UsageError: an index outside the count, or an address without a port.
    """

    coordinator: str  # HOST:PORT of process 0, as the others reach it
    count: int
    index: int
    found: str  # who said so, for messages
    device: int | None = None  # the one GPU of its machine that this process takes; None: all that it can see

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(f"process {self.index} of {self.count}", where=self.found,
                             do="Processes are numbered from 0 to one below their count.")  # fmt: skip
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"'{self.coordinator}' is not HOST:PORT", where=self.found,
                             do="Name a host and a free port of process 0, e.g. --coordinator node1:8476.")  # fmt: skip

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@dataclasses.dataclass(frozen=True)
class _Launcher:
    name: str
    count: str
    index: str
    local: str  # the index on this machine
    here: str | None = None  # variable with the number of processes on this machine


# An MPI under Slurm also sees Slurm's variables, which then describe the MPI's own daemons: MPI comes first.
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("Slurm", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def find(
    coordinator: str | None = None,
    count: int | None = None,
    index: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Group | None:
    """The group that this process belongs to; None where it is alone.

    Args:
      coordinator: HOST:PORT of process 0; None: `JAX_COORDINATOR_ADDRESS`, or as the launcher implies.
      count: processes; given together with `index`, or not at all: then a launcher says both.
      environment: what Open MPI, MPICH or Intel MPI (PMI), Slurm (inside `srun`) and Cloud TPU leave behind.

    Raises:
      UsageError: flags that do not go together, or nothing that names process 0.
    """
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    if (count is None) != (index is None) or (count is not None and coordinator is None):
        raise UsageError("--coordinator, --processes and --process go together", where="--processes",
                         do="Leave all three out where a launcher (srun, mpirun, a TPU pod) says them.")  # fmt: skip
    if count is not None and index is not None:
        return Group(coordinator or "", count, index, "the flags") if count != 1 or index else None
    for launcher in _LAUNCHERS:
        # Slurm sets its task variables in a batch script as well, where nothing but that script runs.
        if launcher.count not in environment or (launcher.name == "Slurm" and "SLURM_STEP_NODELIST" not in environment):
            continue
        count, index = int(environment[launcher.count]), int(environment[launcher.index])
        if count == 1:
            return None
        address = coordinator or _coordinator(launcher, count, environment)
        return Group(address, count, index, launcher.name, _device(launcher, count, environment))
    return _tpu_pod(coordinator)


def _coordinator(launcher: _Launcher, count: int, environment: Mapping[str, str]) -> str:
    base, ports = _PORTS
    if "SLURM_STEP_NODELIST" in environment:
        # node7, node[007-015,020] and node[1-2],other3 all begin with the first node.
        head, bracket, rest = environment["SLURM_STEP_NODELIST"].partition("[")
        first = head.partition(",")[0]
        if bracket and "," not in head:
            first = head + rest.replace("-", ",").replace("]", ",").partition(",")[0]
        steps = 7 * int(environment.get("SLURM_STEP_ID", 0))  # steps of a job may run at once
        return f"{first}:{base + (int(environment['SLURM_JOB_ID']) + steps) % ports}"
    if launcher.here is not None and environment.get(launcher.here) == str(count):
        job = environment.get("PMIX_NAMESPACE") or str(os.getppid())  # the same for all of one launch
        return f"localhost:{base + zlib.crc32(job.encode()) % ports}"
    raise UsageError(f"{launcher.name} started {count} processes on several machines and names no address of process 0",
                     where="--coordinator", do="Pass --coordinator HOST:PORT, a free port of its machine.")  # fmt: skip


def _device(launcher: _Launcher, count: int, environment: Mapping[str, str]) -> int | None:
    """The GPU of a process that shares its machine with others, unless Slurm has given each task its own."""
    if launcher.here is not None:
        shared = environment.get(launcher.here, "1") != "1"
    else:
        bound = "SLURM_GPUS_PER_TASK" in environment or "SLURM_TRES_PER_TASK" in environment
        shared = not bound and count > int(environment.get("SLURM_STEP_NUM_NODES", count))
    return int(environment[launcher.local]) if shared and launcher.local in environment else None


def _tpu_pod(coordinator: str | None) -> Group | None:
    """What the metadata of a TPU virtual machine says, read by JAX."""
    from jax._src import clusters  # jax.distributed.initialize asks the same classes, but only once it waits already

    for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
        if cluster.is_env_present():
            count = cluster.get_process_count()
            if count == 1:
                return None
            address = coordinator or cluster.get_coordinator_address(60, None)
            return Group(address, count, cluster.get_process_id(), "the TPU pod")
    return None
