"""Who a process is, from flags or from what a launcher leaves in its environment."""

import pytest

from lm.base.errors import UsageError
from lm.parallel.launcher import Group, find

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "node[007-010]"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}


def test_flags_say_it_all():
    assert find("a:1", 4, 2, SLURM) == Group("a:1", 4, 2, "the flags")
    assert find("a:1", 1, 0, SLURM) is None


def test_nothing_in_the_environment_is_one_process_alone():
    assert find(environment={}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("node[007-010]", "node007"),
        ("node[007,012-015],x3", "node007"),
        ("gpu-a[3]", "gpu-a3"),
        ("login,node[1-3]", "login"),
    ],
)
def test_slurm_names_the_first_node_and_a_port_of_the_job(nodes, first):
    found = find(environment={**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert (found.address[0], found.count, found.index, found.found) == (first, 4, 2, "Slurm")
    assert 61440 <= found.address[1] < 65536
    other = find(environment={**SLURM, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_ID": "1"})
    assert other.coordinator != found.coordinator  # two steps of a job do not meet


@pytest.mark.parametrize(("environment", "count"), [(OPEN_MPI, 3), (PMI, 2)])
def test_an_mpi_on_one_machine_needs_no_address(environment, count):
    one, other = (find(environment={**environment, "PMIX_NAMESPACE": "job7"}) for _ in range(2))
    assert one == other
    assert (one.address[0], one.count, one.index) == ("localhost", count, 1)


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({**SLURM, "SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0"}, None),  # a task a node: all GPUs
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}, 1),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "1"}, None),  # bound
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({**PMI, "MPI_LOCALRANKID": "1"}, 1),
        ({**PMI, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, None),
    ],
)
def test_processes_that_share_a_machine_take_a_gpu_each(environment, device):
    assert find("a:1", environment=environment).device == device


def test_an_mpi_under_slurm_counts_its_own_processes_and_takes_the_first_node():
    found = find(environment={**SLURM, **OPEN_MPI})
    assert (found.count, found.index, found.address[0]) == (3, 1, "node007")


def test_an_mpi_on_several_machines_is_asked_for_an_address():
    environment = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match=r"Open MPI started 3 processes on several machines.*--coordinator HOST:PORT"):
        find(environment=environment)
    assert find("a:1", environment=environment) == Group("a:1", 3, 1, "Open MPI")
    assert find(environment={**environment, "JAX_COORDINATOR_ADDRESS": "b:2"}).coordinator == "b:2"


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},  # a batch script itself
    ],
)
def test_one_task_of_slurm_is_alone(environment):
    assert find(environment=environment) is None


@pytest.mark.parametrize("name", ["GkeTpuCluster", "GceTpuCluster"])
def test_a_tpu_pod_is_found_by_its_metadata(monkeypatch, name):
    from jax._src import clusters

    cluster = getattr(clusters, name)
    for method, value in (("is_env_present", True), ("get_process_count", 8), ("get_process_id", 5)):
        monkeypatch.setattr(cluster, method, lambda value=value: value)
    monkeypatch.setattr(cluster, "get_coordinator_address", lambda *_: "10.0.0.2:8476")
    assert find(environment={}) == Group("10.0.0.2:8476", 8, 5, "the TPU pod")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("a:1", 2, None), "go together"),
        (("a:1", None, 0), "go together"),
        ((None, 2, 0), "go together"),
        (("a:1", 2, 2), "process 2 of 2"),
        (("a:1", 2, -1), "process -1 of 2"),
        (("a:1", 0, 0), "process 0 of 0"),
        (("a", 2, 0), "'a' is not HOST:PORT"),
        ((":7", 2, 0), "':7' is not HOST:PORT"),
        (("a:seven", 2, 0), "is not HOST:PORT"),
    ],
)
def test_flags_that_say_nothing_sensible_are_refused(flags, words):
    with pytest.raises(UsageError, match=words):
        find(*flags, environment={})


def test_an_address_may_be_of_ip_version_6():
    assert Group("[fe80::1]:70", 2, 0, "").address == ("fe80::1", 70)
