import pytest

from shardkit.launch import environment
from shardkit.launch.environment import Cluster, Told, cluster, lone_pod, several, told, variables

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize("said", [Told("127.0.0.1:4000", 4, 3), Told("[::1]:4000", 1, 0, 2)])
def test_what_the_launcher_says_is_heard(said):
    assert told(variables(said)) == said


def test_nothing_was_said():
    assert told({}) is None
    assert told({environment.DEVICES: "2"}) is None


def test_half_of_it_is_refused():
    with pytest.raises(ValueError, match="but not SHARDKIT_NUM_PROCESSES, SHARDKIT_PROCESS_ID"):
        told({environment.COORDINATOR: "127.0.0.1:4000"})


def test_words_for_numbers_are_refused():
    with pytest.raises(ValueError, match="SHARDKIT_NUM_PROCESSES='two', which is no number"):
        told(variables(Told("127.0.0.1:4000", 2, 1)) | {environment.PROCESSES: "two"})


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (SLURM, Cluster("SLURM_NTASKS", 4, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the body of a batch script
        (OPEN_MPI, Cluster("OMPI_COMM_WORLD_SIZE", 3)),
        (OPEN_MPI | SLURM | {"OMPI_COMM_WORLD_RANK": "2"}, Cluster("OMPI_COMM_WORLD_SIZE", 3, 2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, Cluster("PMI_SIZE", 2, 0)),
        (SLURM | {"PMI_SIZE": "4"}, Cluster("SLURM_NTASKS", 4, 1)),
    ],
)
def test_a_cluster(environ, found):
    assert cluster(environ) == found


@pytest.mark.parametrize(
    ("environ", "lone"),
    [
        ({}, False),
        (POD, True),
        (POD | {"JOB_COMPLETION_INDEX": "0"}, False),
        (POD | {"TPU_WORKER_HOSTNAMES": "a"}, False),
        (POD | SLURM, False),
    ],
)
def test_a_lone_pod(environ, lone):
    assert lone_pod(environ) == lone


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        (SLURM, "SLURM_NTASKS"),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (POD, None),
        (POD | {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_several_processes(environ, name):
    assert several(environ) == name
