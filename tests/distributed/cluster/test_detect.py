"""Recorded environments, a row each, and the cluster that each of them defines."""

import json
from typing import NamedTuple

import pytest

from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.detect import KINDS
from jtrain.errors import ConfigError


class Row(NamedTuple):
    """An environment, and the expected cluster."""

    environ: dict[str, str]
    kind: str
    place: tuple[int, int]  # index, processes
    coordinator: str
    devices: tuple[int, ...] = ()


def slurm(procid: int, **other: str) -> dict[str, str]:
    """Return the environment of one task of `srun` on four nodes, one task on each."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[01-04]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NNODES": "4",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[01-04]",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_PROCID": f"{procid}",
        "SLURM_NODEID": f"{procid}",
        "SLURM_LOCALID": "0",
        **other,
    }


def several_a_node(procid: int, **other: str) -> dict[str, str]:
    """Return the environment of one task on two nodes of four tasks each."""
    return slurm(procid) | {
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu-a[7,12]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_NODEID": f"{procid // 4}",
        "SLURM_LOCALID": f"{procid % 4}",
        **other,
    }


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    there = cluster or {
        "chief": ["10.0.0.1:2222"],
        "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
        "evaluator": ["10.0.0.4:2222"],
    }
    said = {"cluster": there, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(said)}


def job_set(index: int, **other: str) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "HOSTNAME": f"train-workers-0-{index}",
        "JOBSET_NAME": "train",
        "REPLICATED_JOB_NAME": "workers",
        "JOB_COMPLETION_INDEX": f"{index}",
        "PODS_PER_JOB": "4",
        **other,
    }


TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t",
    "TPU_WORKER_ID": "2",
}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "multi-slice-0-0.multi:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
OWN = {
    "JTRAIN_COORDINATOR": "127.0.0.1:40001",
    "JTRAIN_PROCESSES": "2",
    "JTRAIN_PROCESS": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "none",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TRAIN_JOB = {  # of Kubeflow Trainer v2.2
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
    "JAX_COORDINATOR_ADDRESS": "llm-node-0-0.llm:6666",
    "JAX_COORDINATOR_PORT": "6666",
}
SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-23-22-05-53_train_id-1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
EIGHT = ",".join(map(str, range(8)))
ROWS = {
    "nothing at all": Row({"PATH": "/bin", "HOME": "/"}, "one process", (0, 1), "None"),
    "jtrain launch": Row(OWN, "jtrain", (1, 2), "127.0.0.1:40001"),
    "slurm, one node": Row(
        slurm(
            0,
            SLURM_STEP_NODELIST="node07",
            SLURM_STEP_NUM_TASKS="1",
            SLURM_NTASKS="1",
            SLURM_STEP_TASKS_PER_NODE="1",
        ),
        "Slurm",
        (0, 1),
        "node07:62055",
    ),
    "slurm, four nodes": Row(slurm(3), "Slurm", (3, 4), "node01:62055"),
    "slurm, four tasks a node": Row(several_a_node(6), "Slurm", (6, 8), "gpu-a7:62055"),
    "slurm, tasks that share GPUs": Row(
        several_a_node(6, CUDA_VISIBLE_DEVICES=EIGHT), "Slurm", (6, 8), "gpu-a7:62055", (4, 5)
    ),
    "slurm, GPUs bound to tasks": Row(
        several_a_node(6, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_PER_TASK="4"),
        "Slurm",
        (6, 8),
        "gpu-a7:62055",
    ),
    "slurm, another number of tasks on each node": Row(
        several_a_node(2, SLURM_STEP_TASKS_PER_NODE="2,6", SLURM_NODEID="1", SLURM_LOCALID="0"),
        "Slurm",
        (2, 8),
        "gpu-a7:62055",
    ),
    "slurm, a job's script": Row(
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        "one process",
        (0, 1),
        "None",
    ),
    "jobset": Row(job_set(3), "Kubernetes JobSet", (3, 4), "train-workers-0-0.train:8476"),
    "jobset, two jobs": Row(
        job_set(1, JOBS="2", JOB_INDEX="1"),
        "Kubernetes JobSet",
        (5, 8),
        "train-workers-0-0.train:8476",
    ),
    "tpu, one host": Row(
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        "TPU slice",
        (0, 1),
        "localhost:8476",
    ),
    "tpu, four hosts": Row(TPU, "TPU slice", (2, 4), "t-0.t:8476"),
    "tpu, two slices": Row(TPU | SLICES, "2 TPU slices", (6, 8), "multi-slice-0-0.multi:8476"),
    "tpu in a jobset": Row(TPU | job_set(2), "TPU slice", (2, 4), "t-0.t:8476"),
    "TF_CONFIG, chief": Row(tf_config("chief", 0), "TF_CONFIG", (0, 3), "10.0.0.1:2222"),
    "TF_CONFIG, worker": Row(tf_config("worker", 1), "TF_CONFIG", (2, 3), "10.0.0.1:2222"),
    "TF_CONFIG, no chief": Row(
        tf_config("worker", 1, worker=["a:1", "b:1"]), "TF_CONFIG", (1, 2), "a:1"
    ),
    "TF_CONFIG, evaluator": Row(tf_config("evaluator", 0), "TF_CONFIG", (0, 1), "None"),
    "torchrun": Row(TORCHRUN, "torchrun", (9, 16), "10.0.0.1:29501"),
    "torchrun, eight GPUs": Row(
        TORCHRUN | {"CUDA_VISIBLE_DEVICES": EIGHT}, "torchrun", (9, 16), "10.0.0.1:29501", (1,)
    ),
    "open mpi": Row(MPI, "Open MPI", (3, 4), "10.96.0.1:62624"),
    "kubeflow trainer": Row(TRAIN_JOB, "JAX environment", (3, 4), "llm-node-0-0.llm:6666"),
    "kubeflow trainer, the port apart": Row(
        TRAIN_JOB | {"JAX_COORDINATOR_ADDRESS": "llm-node-0-0.llm"},
        "JAX environment",
        (3, 4),
        "llm-node-0-0.llm:6666",
    ),
    "skypilot": Row(SKY, "SkyPilot", (1, 2), "10.0.0.7:8476"),
    "skypilot, one node": Row(
        SKY
        | {
            "SKYPILOT_NUM_NODES": "1",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "10.0.0.7",
        },
        "SkyPilot",
        (0, 1),
        "10.0.0.7:8476",
    ),
    "torchrun on skypilot": Row(TORCHRUN | SKY, "torchrun", (9, 16), "10.0.0.1:29501"),
    "mpich": Row(HYDRA, "MPICH", (1, 2), "127.0.0.1:8476"),
    "mpich, two GPUs": Row(
        HYDRA | {"CUDA_VISIBLE_DEVICES": "0,1"}, "MPICH", (1, 2), "127.0.0.1:8476", (1,)
    ),
    "slurm by pmi": Row(slurm(3, PMI_RANK="3", PMI_SIZE="4"), "Slurm", (3, 4), "node01:62055"),
    "torchrun under slurm": Row(TORCHRUN | slurm(1), "torchrun", (9, 16), "10.0.0.1:29501"),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_recorded_environment_defines_the_cluster(row: Row):
    found = detect(row.environ)
    assert found.kind == row.kind
    assert (found.index, found.processes) == row.place
    assert str(found.coordinator) == row.coordinator
    assert found.devices == row.devices
    assert found.by.items() <= row.environ.items(), (
        "the recorded variables are those of the environment"
    )
    assert found.role == ("evaluates" if '"type": "evaluator"' in str(found.by) else "trains")


def test_every_kind_has_a_recorded_environment():
    for kind in KINDS:
        assert any(set(kind.marks) & row.environ.keys() for row in ROWS.values()), kind.name


def test_a_list_of_lines_is_shown_on_one_line():
    assert "SKYPILOT_NODE_IPS=10.0.0.7 10.0.0.8" in detect(SKY).variables


def test_notes_other_clusters_in_the_environment():
    assert "Slurm is set too" in detect(TORCHRUN | slurm(1)).note
    assert "type srun" in detect(ROWS["slurm, a job's script"].environ).note


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


WRONG = {
    "TF_CONFIG is not JSON: Expecting value": {"TF_CONFIG": "worker:0"},
    "TF_CONFIG should have an object 'task'": {"TF_CONFIG": '{"cluster": {}}'},
    "TF_CONFIG should have an object 'cluster'": {"TF_CONFIG": "[1]"},
    r'this process as task {"type": "worker", "index": 2} of .* 1 chief, 2 worker': tf_config(
        "worker", 2
    ),
    "tasks of type master, and only chief, worker": tf_config(
        "worker", 0, worker=["a:1"], master=[]
    ),
    "Unset .* CONFIG parallel.kind=server parallel.shards=2 parallel.workers=3": tf_config(
        "worker", 0, chief=["a:1"], worker=["b:1", "c:1"], ps=["d:1", "e:1"]
    ),
    "TF_CONFIG is the address of process 0, and 'a' is not HOST:PORT": tf_config(
        "worker", 0, worker=["a", "b"]
    ),
    "jtrain is half set: JTRAIN_PROCESSES=2 is set, and JTRAIN_PROCESS is missing": without(
        OWN, "JTRAIN_PROCESS"
    ),
    "Set JTRAIN_COORDINATOR too": without(OWN, "JTRAIN_COORDINATOR"),
    r"this is process 2 of 2.*JTRAIN_PROCESS=2.*Set an index in 0 .. 1": OWN
    | {"JTRAIN_PROCESS": "2"},
    "JTRAIN_PROCESSES should be a number from 0 on and is 'two'": OWN | {"JTRAIN_PROCESSES": "two"},
    "'127.0.0.1:http' is not HOST:PORT": OWN | {"JTRAIN_COORDINATOR": "127.0.0.1:http"},
    "torchrun is half set: .* RANK is missing": without(TORCHRUN, "RANK"),
    "Slurm is half set: .* SLURM_PROCID is missing": without(slurm(1), "SLURM_PROCID"),
    r"a list of hosts, such as node\[01-04,07\], and is 'node\[4-1": slurm(
        1, SLURM_STEP_NODELIST="node[4-1]"
    ),
    r"tasks per node, such as 2\(x4\),1, and is 'all'": slurm(1, SLURM_STEP_TASKS_PER_NODE="all"),
    "TPU_WORKER_ID=4, and TPU_WORKER_HOSTNAMES has only 4 hosts": TPU | {"TPU_WORKER_ID": "4"},
    "MEGASCALE_COORDINATOR_ADDRESS is missing": TPU | {"MEGASCALE_NUM_SLICES": "2"},
    "Kubernetes JobSet is half set: .* PODS_PER_JOB is missing": without(
        job_set(0), "PODS_PER_JOB"
    ),
    "JAX environment is half set: .* JAX_NUM_PROCESSES is missing": without(
        TRAIN_JOB, "JAX_NUM_PROCESSES"
    ),
    "SKYPILOT_NUM_NODES=3, and SKYPILOT_NODE_IPS has 2 addresses": SKY
    | {"SKYPILOT_NUM_NODES": "3"},
    "MPICH started 4 processes, 2 of them on this machine": HYDRA | {"PMI_SIZE": "4"},
    "Open MPI started 4 processes on several machines and does not say where": without(
        MPI, "OMPI_MCA_orte_hnp_uri"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_reports_an_invalid_environment(message: str):
    with pytest.raises(ConfigError, match=message) as error:
        detect(WRONG[message])
    assert any(word in str(error.value) for word in ("Set ", "Unset", "Leave"))
