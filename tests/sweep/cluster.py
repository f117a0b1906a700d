"""A Slurm of one node on this machine, from Debian's packages, for as long as a test module needs it."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
DEADLINE = 900.0  # seconds for what takes few on a quiet machine

_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0
ReturnToService=2
MpiDefault=none
KillWait=120
AccountingStorageType=accounting_storage/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """Runs munged, slurmctld and slurmd on free ports with everything in `folder`, and points SLURM_CONF at them.

    Yields a folder that the node does not share: it sees an empty file system there.
    """
    _skip_unless_possible()
    for name in ("state", "spool", "unshared"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    controller, node = _free_ports(2)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, controller=controller, node=node))
    files = [f"--{name}={folder / file}" for name, file in (("key-file", "munge.key"), ("socket", "munge.sock"),
             ("pid-file", "munged.pid"), ("log-file", "munged.log"), ("seed-file", "munged.seed"))]  # fmt: skip
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SLURM_CONF", str(conf))
        stack.enter_context(_daemon(["munged", "--foreground", "--force", *files]))
        wait_for(lambda: (folder / "munge.sock").exists(), "munged's socket")
        stack.enter_context(_daemon(["slurmctld", "-D", "-f", str(conf)]))
        hidden = f'mount -t tmpfs none "{folder / "unshared"}" && exec slurmd -D -f "{conf}"'
        stack.enter_context(_daemon(["unshare", "--mount", "sh", "-c", hidden]))
        wait_for(lambda: ask("sinfo", "--noheader", "--format=%T") == ["idle"], "an idle node")
        try:
            yield folder / "unshared"
        finally:
            ask("scancel", "--user=root")
            wait_for(lambda: not ask("squeue", "--noheader"), "the end of all jobs")


def ask(*command: str) -> list[str]:
    """The lines that a command of Slurm prints; none while it cannot reach the controller."""
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Returns when `condition` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def _skip_unless_possible() -> None:
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)}: install slurm-wlm and munge")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started as root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")


@contextlib.contextmanager
def _daemon(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
