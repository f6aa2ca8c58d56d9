"""A process that no launcher numbered says so, where a scheduler gave several machines."""

from pathlib import Path

import pytest

from jtrain.distributed.cluster import detect
from jtrain.errors import ConfigError

BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
LSF = {"LSB_JOBID": "4711", "LSB_MCPU_HOSTS": "node1 8 node2 8", "LSB_DJOB_NUMPROC": "16"}


@pytest.fixture
def pbs(tmp_path: Path) -> dict[str, str]:
    """The environment of the script of a PBS job on two hosts of two processors."""
    nodes = tmp_path / "4711.pbs"
    nodes.write_text("node1\nnode1\nnode2\nnode2\n")
    return {"PBS_JOBID": "4711.pbs", "PBS_NODEFILE": str(nodes), "PBS_NODENUM": "0"}


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        (BATCH | {"SLURM_NTASKS": "4"}, "a Slurm job of 4 tasks, and srun did not start"),
        (BATCH, "a Slurm job of 2 nodes, .* trains by itself: type srun before it"),
        (LSF, "a job of LSF on 2 hosts, .*: start it by jsrun or mpirun, or set JTRAIN_COORD"),
        ({"K_MPI_JOB_ROLE": "launcher"}, "launcher of a Kubeflow MPIJob, .*type mpirun before it"),
    ],
)
def test_a_process_without_its_launcher_is_warned_of(environ: dict[str, str], warning: str):
    found = detect(environ)
    assert (found.kind, found.processes) == ("one process", 1)
    (line,) = found.describe()
    with pytest.raises(ValueError, match=warning):
        raise ValueError(line)
    assert f"warning      {line}" in str(found)


def test_a_pbs_script_is_warned_of_and_a_task_of_pbsdsh_refused(pbs: dict[str, str]):
    (line,) = detect(pbs).describe()
    assert line.startswith(
        "a job of PBS on 2 hosts, and this process trains by itself on one of them"
    )
    for name in ("PBS_NODENUM", "PBS_VNODENUM"):
        with pytest.raises(ConfigError, match=f"pbsdsh started this process .*{name}=1") as error:
            detect(pbs | {name: "1"})
        assert "JTRAIN_PROCESSES=1 if each trains by itself" in str(error.value)


def test_the_advice_ends_the_warning(pbs: dict[str, str]):
    by_hand = {
        "JTRAIN_COORDINATOR": "node1:8476",
        "JTRAIN_PROCESSES": "2",
        "JTRAIN_PROCESS": "1",
    }
    for environ in (BATCH, LSF, pbs, pbs | {"PBS_NODENUM": "1"}):
        assert detect(environ | by_hand).processes == 2
        alone = detect(environ | {"JTRAIN_PROCESSES": "1"})
        assert (alone.processes, alone.describe()) == (1, [])


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"LSB_JOBID": "4711", "LSB_MCPU_HOSTS": "node1 8"},
        {"PBS_NODEFILE": "/no/such/file", "PBS_NODENUM": "0"},
        {"K_MPI_JOB_ROLE": "worker"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "web-6b7f8c9d4-x2x7k"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"COORDINATOR_ADDRESS": "http://broker:1234"},
        {"AWS_BATCH_JOB_ID": "106e00f2", "AWS_BATCH_JOB_ARRAY_INDEX": "3"},
    ],
)
def test_one_process_is_not_warned_of(environ: dict[str, str]):
    found = detect(environ)
    assert (found.kind, found.processes, found.describe()) == ("one process", 1, [])
