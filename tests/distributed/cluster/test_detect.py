"""Recorded environments, a row each, and the cluster that each of them defines."""

import json
import re
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.kinds import KINDS
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
MPI = {  # the address is an example of jax/_src/clusters/ompi_cluster.py
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
# Open MPI 4.1.4 of Debian 12: mpirun --host pi-worker-0.pi.default.svc,... on the machine `head`,
# as the launcher of a Kubeflow MPIJob starts it, with OMPI_MCA_orte_keep_fqdn_hostnames=true.
MPI_JOB = {
    "K_MPI_JOB_ROLE": "worker",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_MCA_orte_node_regex": "head,pi-worker-[1:0-1].pi.default.svc@0(3)",
    "OMPI_MCA_orte_hnp_uri": "1041432576.0;tcp://10.0.0.9:50911;tcp6://[fd00::2]:47223",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1041432577",
}
# Open MPI 5.0.11 of PyPI: mpirun --host n1:1,n2:1 -np 2. The server is the daemon on this machine.
MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_WORLD_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-head-17800@1",
    "PMIX_HOSTNAME": "n2",
    "PMIX_SERVER_URI4": "prterun-head-17800@0.2;tcp4://127.0.0.1:42563",
    "PRTE_LAUNCHED": "1",
}
PRRTE = {  # the same without the variables of Open MPI
    name: value for name, value in MPI_5.items() if not name.startswith("OMPI")
}
# pkg/controller.v1/jax/envvar.go of kubeflow/training-operator
JAX_JOB = {
    "COORDINATOR_ADDRESS": "llm-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "4",
    "PROCESS_ID": "2",
    "PYTHONUNBUFFERED": "1",
}
# src/xpk/core/docker_resources.py of AI-Hypercomputer/xpk: pods with GPUs, pods without
XPK_GPU = {
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "slice-job",
    "NNODES": "2",
    "NODE_RANK": "1",
    "USE_GPUDIRECT": "fastrak",
    "GPUS_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_PORT": "6002",
    "JAX_COORDINATOR_ADDRESS": "train-slice-job-0-0.train",
}
XPK_CPU = {
    "REPLICATED_JOB_NAME": "slice-job",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JAX_PROCESS_COUNT": "4",
    "JAX_COORDINATOR_ADDRESS": "train-slice-job-0-0.train",
}
# https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "train-3",
    "JOB_COMPLETION_INDEX": "3",
}
# https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
AWS = {
    "AWS_BATCH_JOB_ID": "106e00f2-4c5b-4c8f-9d6c-1d1f8b9a2f10#2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.11",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
}
# LSFEnvironment of lightning.ai/docs/fabric; the batch node comes first
JSRUN = {
    "LSB_JOBID": "4711",
    "LSB_MCPU_HOSTS": "batch5 1 h36n09 42 h36n10 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
}
# Intel MPI 2021.18 of PyPI (impi-rt): mpiexec.hydra -hosts n1,n2 -ppn 1
INTEL = {
    "HYDRA_BSTRAP_LOCALHOST": "n1",
    "I_MPI_HYDRA_UUID": "2c420000-3a94-3956-1161-0600ec1d8447",
    "MPI_LOCALNRANKS": "1",
    "MPI_LOCALRANKID": "0",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# Cray's mpiexec, as docs/source/supported/polaris.rst of radical.pilot and
# https://gist.github.com/chengscott/f82735756d831643633f4453631f9980 use its variables.
PALS = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
# A step over both components of a heterogeneous job: sorted nodes, tasks by component. Source:
# _reorder_het_job_recs in src/srun/srun.c of SchedMD/slurm.
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "z[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "a1",
    "SLURM_STEP_NODELIST": "a1,z[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}
HYDRA = {  # MPICH 5.0 of PyPI: mpiexec -n 2
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "head",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
EIGHT = ",".join(map(str, range(8)))
# As 22.05.8 sets them: `#SBATCH -n1 -w node2`, `hetjob`, `-n2 -w node1`; `srun --het-group=0,1`.
HET_JOB = {
    "SLURMD_NODENAME": "node1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
}
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
    "slurm, components of a job": Row(HET_JOB, "Slurm", (2, 3), "node2:61441"),
    "slurm, one component of a job": Row(
        HET_JOB
        | {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "2"}
        | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0"},
        "Slurm",
        (1, 2),
        "node1:61441",
    ),
    "slurm, another step of the job": Row(
        slurm(3, SLURM_STEP_ID="1"), "Slurm", (3, 4), "node01:62312"
    ),
    "slurm, an address of the user's": Row(
        slurm(3, JTRAIN_COORDINATOR="node04:8500"), "Slurm", (3, 4), "node04:8500"
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
    "mpich, two machines": Row(
        HYDRA | {"MPI_LOCALNRANKS": "1", "JTRAIN_COORDINATOR": "n1:9000"},
        "MPICH",
        (1, 2),
        "n1:9000",
    ),
    "intel mpi": Row(INTEL | {"JTRAIN_COORDINATOR": "n1:9000"}, "MPICH", (1, 2), "n1:9000"),
    "pals": Row(PALS | {"CUDA_VISIBLE_DEVICES": "0,1"}, "PMI", (1, 2), "127.0.0.1:8476", (1,)),
    "open mpi 4, kubeflow's mpi operator": Row(
        MPI_JOB, "Open MPI", (1, 2), "pi-worker-0.pi.default.svc:61744"
    ),
    "open mpi 4, processes beside mpirun": Row(
        MPI_JOB | {"OMPI_MCA_orte_node_regex": "head,n[2:8]@0(2)"},
        "Open MPI",
        (1, 2),
        "10.0.0.9:61744",
    ),
    "open mpi 4, by ipv6": Row(
        MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},
        "Open MPI",
        (3, 4),
        "[fe80::b9b]:61441",
    ),
    "open mpi 5": Row(
        MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI", (1, 2), "127.0.0.1:8476"
    ),
    "open mpi 5, two machines": Row(
        MPI_5 | {"JTRAIN_COORDINATOR": "n1:9000"}, "Open MPI", (1, 2), "n1:9000"
    ),
    "prrte": Row(
        PRRTE | {"JTRAIN_COORDINATOR": "n1:9000", "JTRAIN_PROCESSES": "2"},
        "PMIx",
        (1, 2),
        "n1:9000",
    ),
    "lsf, jsrun": Row(JSRUN, "LSF jsrun", (3, 4), "h36n09:62055"),
    "kubeflow training operator": Row(JAX_JOB, "Kubeflow JAXJob", (2, 4), "llm-worker-0:6666"),
    "xpk, gpu": Row(XPK_GPU, "JAX environment", (1, 2), "train-slice-job-0-0.train:6002"),
    "xpk, cpu": Row(XPK_CPU, "JAX environment", (3, 4), "train-slice-job-0-0.train:8476"),
    "xpk, tpu": Row(
        TPU | SLICES | {"JOB_COMPLETION_INDEX": "2"},
        "2 TPU slices",
        (6, 8),
        "multi-slice-0-0.multi:8476",
    ),
    "tpu, by process addresses": Row(
        {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471", "TPU_WORKER_ID": "1"},
        "TPU slice",
        (1, 2),
        "10.0.0.1:8476",
    ),
    "kaggle, one tpu host": Row(
        {"TPU_PROCESS_ADDRESSES": "local"}, "TPU slice", (0, 1), "local:8476"
    ),
    "indexed job": Row(
        INDEXED_JOB | {"JTRAIN_PROCESSES": "4", "JTRAIN_COORDINATOR": "train-0.pods:8476"},
        "Kubernetes Job",
        (3, 4),
        "train-0.pods:8476",
    ),
    "aws batch": Row(AWS, "AWS Batch", (2, 4), "10.0.0.11:8476"),
    "aws batch, the main node": Row(
        {
            name: value
            for name, value in AWS.items()
            if name != "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
        }
        | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", "AWS_BATCH_JOB_NODE_INDEX": "1"},
        "AWS Batch",
        (0, 4),
        f"{socket.gethostname()}:8476",
    ),
    "aws batch, a node before the main one": Row(
        AWS | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", "AWS_BATCH_JOB_NODE_INDEX": "0"},
        "AWS Batch",
        (3, 4),
        "10.0.0.11:8476",
    ),
    "slurm, two components": Row(slurm(3, **HET), "Slurm", (3, 4), "z1:62055"),
    "slurm, two components that share GPUs": Row(
        slurm(3, **HET, CUDA_VISIBLE_DEVICES="0,1"), "Slurm", (3, 4), "z1:62055", (1,)
    ),
    "slurm, the second component alone": Row(
        slurm(0, **HET | {"SLURM_STEP_NODELIST": "a1", "SLURM_STEP_NUM_TASKS": "2"}),
        "Slurm",
        (0, 2),
        "a1:62055",
        (),
    ),
    "slurm, another address": Row(
        slurm(3, JTRAIN_COORDINATOR="n-ib:9000"), "Slurm", (3, 4), "n-ib:9000"
    ),
    "slurm with pytorch's variables": Row(
        slurm(3, MASTER_ADDR="node01", MASTER_PORT="29500", WORLD_SIZE="4"),
        "Slurm",
        (3, 4),
        "node01:62055",
    ),
    "alone within slurm": Row(slurm(3, JTRAIN_PROCESSES="1"), "jtrain", (0, 1), "None"),
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


def test_the_page_lists_every_kind_in_its_order_with_its_variables():
    lines = (Path(__file__).parents[3] / "docs/processes.md").read_text().splitlines()
    first = lines.index("| | recognised by | process 0 is at |") + 2
    rows = [line.strip("| ").split(" | ") for line in lines[first : first + len(KINDS)]]
    for kind, (name, marks, _) in zip(KINDS, rows, strict=True):
        assert name.startswith(kind.name)
        assert {f"`{variable}`" for variable in (*kind.marks, *kind.needs)} <= set(
            re.findall(r"`\w+`", marks)
        )
    assert lines[first + len(KINDS)].startswith("| a TPU VM |")
    assert not lines[first + len(KINDS) + 1].startswith("|"), "and no other"


def test_a_list_of_lines_is_shown_on_one_line():
    assert "SKYPILOT_NODE_IPS=10.0.0.7 10.0.0.8" in detect(SKY).variables


def test_notes_other_clusters_in_the_environment():
    assert "Slurm is set too" in detect(TORCHRUN | slurm(1)).note
    assert "Slurm is set too" in detect(slurm(3, JTRAIN_PROCESSES="1")).note
    assert detect(MPI_5 | {"JTRAIN_COORDINATOR": "n1:1"}).note == "", "its own PMIx is no other"
    assert detect(job_set(1)).note == ""
    assert "Kubernetes JobSet is set too" in detect(TPU | job_set(2)).note


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


WRONG = {
    "TF_CONFIG is not JSON: Expecting value": {"TF_CONFIG": "worker:0"},
    "TF_CONFIG should have an object 'task'": {"TF_CONFIG": '{"cluster": {}}'},
    "TF_CONFIG should have an object 'cluster'": {"TF_CONFIG": "[1]"},
    r'this process as task {"type": "worker", "index": 2} of .* 1 chief, 2 worker': tf_config(
        "worker", 2
    ),
    "tasks of type master, and only chief, ps, worker": tf_config(
        "worker", 0, worker=["a:1"], master=[]
    ),
    "tasks of type ps, and no task of type chief.* Set a chief": tf_config(
        "worker", 0, worker=["b:1", "c:1"], ps=["d:1", "e:1"]
    ),
    """the address 'a' in cluster, and an address is HOST:PORT. Set "a:8476" there""": tf_config(
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
    r"task 0 is on node02, and the list begins with node01.*=NODE:62055 srun": slurm(
        0, SLURM_NODEID="1", SLURMD_NODENAME="node02"
    ),
    r"task 2 is on node04, which is not node 2 of the list": slurm(2, SLURMD_NODENAME="node04"),
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
    r"MPICH started 4 processes on several .* mpiexec -genv JTRAIN_COORDINATOR": HYDRA
    | {"PMI_SIZE": "4"},
    "PMI started 4 processes on several machines": PALS | {"PMI_SIZE": "4"},
    r"Open MPI started 2 processes on several .* mpirun -x JTRAIN_COORDINATOR": MPI_5,
    r"PMIx started this process as number 1 .*PMIX_RANK=1.* prterun -x JTRAIN_PROCESSES=4": PRRTE,
    r"PMIx started this process .*JTRAIN_PROCESSES=1 if each trains by itself": PRRTE
    | {"JTRAIN_COORDINATOR": "n1:9000"},
    "jsrun started 4 processes on several machines": without(JSRUN, "LSB_MCPU_HOSTS"),
    r"OMPI_MCA_orte_node_regex should be a list of hosts": MPI_JOB
    | {"OMPI_MCA_orte_node_regex": "head,n[1:"},
    r"a Kubernetes Job started this pod as number 3 .*JTRAIN_COORDINATOR=train-0.SERVICE:8476": (
        INDEXED_JOB
    ),
    r"pod as number 0 .*JTRAIN_COORDINATOR=JOB-0.SERVICE:8476.*JTRAIN_PROCESSES=1 if each": (
        INDEXED_JOB | {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-node-of-hostNetwork"}
    ),
    "AWS Batch is half set: .* AWS_BATCH_JOB_NODE_INDEX is missing": {
        "AWS_BATCH_JOB_NUM_NODES": "4"
    },
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is missing": without(
        AWS, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    ),
    "AWS Batch: this is process 4 of 4": AWS | {"AWS_BATCH_JOB_NODE_INDEX": "4"},
    "SLURM_JOB_NODELIST_HET_GROUP_0 is missing": without(
        slurm(3, **HET | {"SLURM_JOB_NODELIST_HET_GROUP_1": ""}), "SLURM_JOB_NODELIST_HET_GROUP_0"
    ),
    "JTRAIN_PROCESSES=2, and Slurm started 4": slurm(3, JTRAIN_PROCESSES="2"),
    # Parts of a kind that only several processes have.
    "torchrun is half set: .*WORLD_SIZE=2.* MASTER_ADDR is missing": {
        "WORLD_SIZE": "2",
        "RANK": "0",
    },
    "JAX environment is half set: .* JAX_COORDINATOR_ADDRESS is missing": {
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
    },
    "Open MPI is half set: .* OMPI_COMM_WORLD_SIZE is missing": {"OMPI_COMM_WORLD_RANK": "1"},
    "SkyPilot is half set: .* SKYPILOT_NODE_IPS is missing": {"SKYPILOT_NUM_NODES": "2"},
    "TPU is half set: .* TPU_WORKER_HOSTNAMES is missing": {"TPU_WORKER_ID": "2"},
    "TPU is half set: .* is set, and TPU_WORKER_HOSTNAMES is missing": {
        "MEGASCALE_NUM_SLICES": "2"
    },
    "Slurm is half set: .* SLURM_STEP_NODELIST is missing": {"SLURM_PROCID": "1"},
    # One process within each of several.
    "torchrun is one process .*, and Slurm started several .*each would train by itself": slurm(2)
    | TORCHRUN
    | {"WORLD_SIZE": "1", "RANK": "0"},
    "Open MPI is one process .*, and Slurm started several .*Unset OMPI_COMM_WORLD_SIZE": slurm(0)
    | MPI
    | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "TPU slice is one process .*, and Kubernetes JobSet started several": job_set(1)
    | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    "Slurm is one process .*, and SkyPilot started several": ROWS["slurm, one node"].environ | SKY,
    "Open MPI started 4 processes on several machines and does not say where": without(
        MPI, "OMPI_MCA_orte_hnp_uri"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_reports_an_invalid_environment(message: str):
    with pytest.raises(ConfigError, match=message) as error:
        detect(WRONG[message])
    assert any(word in str(error.value) for word in ("Set ", "Unset", "Leave"))
