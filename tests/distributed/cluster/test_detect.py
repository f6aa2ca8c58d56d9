"""Recorded environments, a row each, and the cluster that each of them defines."""

import json
import re
import socket
from pathlib import Path

import pytest

from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.detect import KINDS
from jtrain.distributed.cluster.schedulers import parse_hosts, parse_tasks
from jtrain.errors import ConfigError


def env(text: str) -> dict[str, str]:
    """Return the variables of a text such as `A=1 B=2`."""
    pairs = (word.split("=", 1) for word in text.split())
    return {name: value for name, value in pairs}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


def slurm(procid: int, **other: str) -> dict[str, str]:
    """Return the environment of one task of `srun` on four nodes, one task on each."""
    text = f"""
    SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=node[01-04] SLURM_JOB_NUM_NODES=4 SLURM_NNODES=4
    SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[01-04] SLURM_STEP_NUM_NODES=4
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_TASKS_PER_NODE=1(x4)
    SLURM_PROCID={procid} SLURM_NODEID={procid} SLURM_LOCALID=0"""
    return env(text) | other


def several_a_node(procid: int, **other: str) -> dict[str, str]:
    """Return the environment of one task on two nodes of four tasks each."""
    text = f"""
    SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NODELIST=gpu-a[7,12]
    SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_NODEID={procid // 4} SLURM_LOCALID={procid % 4}"""
    return slurm(procid) | env(text) | other


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    there = cluster or {
        "chief": ["10.0.0.1:2222"],
        "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
        "evaluator": ["10.0.0.4:2222"],
    }
    said = {"cluster": there, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(said)}


def job_set(index: int, **other: str) -> dict[str, str]:
    text = f"""
    KUBERNETES_SERVICE_HOST=10.96.0.1 HOSTNAME=train-workers-0-{index} JOBSET_NAME=train
    REPLICATED_JOB_NAME=workers JOB_COMPLETION_INDEX={index} PODS_PER_JOB=4"""
    return env(text) | other


TPU = env("""
    TPU_ACCELERATOR_TYPE=v5litepod-16 TPU_TOPOLOGY=4x4
    TPU_WORKER_HOSTNAMES=t-0.t,t-1.t,t-2.t,t-3.t TPU_WORKER_ID=2
""")
SLICES = env("""
    MEGASCALE_COORDINATOR_ADDRESS=multi-slice-0-0.multi:8080 MEGASCALE_NUM_SLICES=2
    MEGASCALE_SLICE_ID=1
""")
OWN = env("JTRAIN_COORDINATOR=127.0.0.1:40001 JTRAIN_PROCESSES=2 JTRAIN_PROCESS=1")
TORCHRUN = env("""
    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=16 RANK=9 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8
    TORCHELASTIC_RUN_ID=none
""")
# of Kubeflow Trainer v2.2
TRAIN_JOB = env("""
    KUBERNETES_SERVICE_HOST=10.96.0.1 JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3
    JAX_COORDINATOR_ADDRESS=llm-node-0-0.llm:6666 JAX_COORDINATOR_PORT=6666
""")
SKY = env("""
    SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_GPUS_PER_NODE=8
    SKYPILOT_TASK_ID=sky-2026-11-23-22-05-53_train_id-1
""") | {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
# Open MPI 4.1.4 of Debian 12: mpirun --host pi-worker-0.pi.default.svc,... on the machine `head`,
# as the launcher of a Kubeflow MPIJob starts it, with OMPI_MCA_orte_keep_fqdn_hostnames=true.
MPI_JOB = env("""
    K_MPI_JOB_ROLE=worker OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0
    OMPI_MCA_orte_num_nodes=2 OMPI_MCA_orte_node_regex=head,pi-worker-[1:0-1].pi.default.svc@0(3)
    OMPI_MCA_orte_hnp_uri=1041432576.0;tcp://10.0.0.9:50911;tcp6://[fd00::2]:47223 PMIX_RANK=1
    PMIX_NAMESPACE=1041432577
""")
# Open MPI 5.0.11 of PyPI: mpirun --host n1:1,n2:1 -np 2. The server is the daemon on this machine.
MPI_5 = env("""
    OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0
    OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_WORLD_SIZE=2 OMPI_VERSION=5.0.11 PMIX_RANK=1
    PMIX_NAMESPACE=prterun-head-17800@1 PMIX_HOSTNAME=n2
    PMIX_SERVER_URI4=prterun-head-17800@0.2;tcp4://127.0.0.1:42563 PRTE_LAUNCHED=1
""")
PRRTE = {  # the same without the variables of Open MPI
    name: value for name, value in MPI_5.items() if not name.startswith("OMPI")
}
# pkg/controller.v1/jax/envvar.go of kubeflow/training-operator
JAX_JOB = env("""
    COORDINATOR_ADDRESS=llm-worker-0 COORDINATOR_PORT=6666 NUM_PROCESSES=4 PROCESS_ID=2
    PYTHONUNBUFFERED=1
""")
# https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
INDEXED_JOB = env("KUBERNETES_SERVICE_HOST=10.96.0.1 HOSTNAME=train-3 JOB_COMPLETION_INDEX=3")
# https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
AWS = env("""
    AWS_BATCH_JOB_ID=106e00f2-4c5b-4c8f-9d6c-1d1f8b9a2f10#2 AWS_BATCH_JOB_MAIN_NODE_INDEX=0
    AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.11 AWS_BATCH_JOB_NODE_INDEX=2
    AWS_BATCH_JOB_NUM_NODES=4
""")
# LSFEnvironment of lightning.ai/docs/fabric; the batch node comes first
JSRUN = env("""
    LSB_JOBID=4711 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1
    JSM_NAMESPACE_LOCAL_SIZE=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3
""") | {"LSB_MCPU_HOSTS": "batch5 1 h36n09 42 h36n10 42"}
# Cray's mpiexec, as docs/source/supported/polaris.rst of radical.pilot and
# https://gist.github.com/chengscott/f82735756d831643633f4453631f9980 use its variables.
PALS = env("PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2")
# MPICH 5.0 of PyPI: mpiexec -n 2
HYDRA = env("""
    PMI_RANK=1 PMI_SIZE=2 PMI_FD=11 PMI_HOSTNAME=head HYDI_CONTROL_FD=7 MPI_LOCALRANKID=1
    MPI_LOCALNRANKS=2
""")
EIGHT = ",".join(map(str, range(8)))
ROWS = {
    "jtrain launch": (OWN, "jtrain: 1 of 2 at 127.0.0.1:40001"),
    "slurm, four nodes": (slurm(3), "Slurm: 3 of 4 at node01:62055"),
    "slurm, tasks that share GPUs": (several_a_node(6, CUDA_VISIBLE_DEVICES=EIGHT),
        "Slurm: 6 of 8 at gpu-a7:62055, devices 4,5"),
    "slurm, another step of the job": (slurm(3, SLURM_STEP_ID="1"),
        "Slurm: 3 of 4 at node01:62312"),
    "jobset, two jobs": (job_set(1, JOBS="2", JOB_INDEX="1"),
        "Kubernetes JobSet: 5 of 8 at train-workers-0-0.train:8476"),
    "tpu, four hosts": (TPU, "TPU slice: 2 of 4 at t-0.t:8476"),
    "tpu, two slices": (TPU | SLICES, "2 TPU slices: 6 of 8 at multi-slice-0-0.multi:8476"),
    "TF_CONFIG, chief": (tf_config("chief", 0), "TF_CONFIG: 0 of 3 at 10.0.0.1:2222"),
    "TF_CONFIG, worker": (tf_config("worker", 1), "TF_CONFIG: 2 of 3 at 10.0.0.1:2222"),
    "TF_CONFIG, evaluator": (tf_config("evaluator", 0), "TF_CONFIG: 0 of 1 at None"),
    "torchrun, eight GPUs": (TORCHRUN | {"CUDA_VISIBLE_DEVICES": EIGHT},
        "torchrun: 9 of 16 at 10.0.0.1:29501, devices 1"),
    "kubeflow trainer": (TRAIN_JOB, "JAX environment: 3 of 4 at llm-node-0-0.llm:6666"),
    "skypilot": (SKY, "SkyPilot: 1 of 2 at 10.0.0.7:8476"),
    "mpich": (HYDRA, "MPICH: 1 of 2 at 127.0.0.1:8476"),
    "pals": (PALS | {"CUDA_VISIBLE_DEVICES": "0,1"}, "PMI: 1 of 2 at 127.0.0.1:8476, devices 1"),
    "open mpi 4, kubeflow's mpi operator": (MPI_JOB,
        "Open MPI: 1 of 2 at pi-worker-0.pi.default.svc:61744"),
    "open mpi 5": (MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "Open MPI: 1 of 2 at 127.0.0.1:8476"),
    "prrte": (PRRTE | {"JTRAIN_COORDINATOR": "n1:9000", "JTRAIN_PROCESSES": "2"},
        "PMIx: 1 of 2 at n1:9000"),
    "lsf, jsrun": (JSRUN, "LSF jsrun: 3 of 4 at h36n09:62055"),
    "kubeflow training operator": (JAX_JOB, "Kubeflow JAXJob: 2 of 4 at llm-worker-0:6666"),
    "tpu, by process addresses": ({"TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471",
        "TPU_WORKER_ID": "1"}, "TPU slice: 1 of 2 at 10.0.0.1:8476"),
    "kaggle, one tpu host": ({"TPU_PROCESS_ADDRESSES": "local"}, "TPU slice: 0 of 1 at local:8476"),
    "indexed job": (INDEXED_JOB | {"JTRAIN_PROCESSES": "4",
        "JTRAIN_COORDINATOR": "train-0.pods:8476"}, "Kubernetes Job: 3 of 4 at train-0.pods:8476"),
    "aws batch": (AWS, "AWS Batch: 2 of 4 at 10.0.0.11:8476"),
    "aws batch, the main node": (without(AWS,
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS") | {"AWS_BATCH_JOB_NODE_INDEX": "0"},
        f"AWS Batch: 0 of 4 at {socket.gethostname()}:8476"),
    "slurm, another address": (slurm(3, JTRAIN_COORDINATOR="n-ib:9000"),
        "Slurm: 3 of 4 at n-ib:9000"),
    "alone within slurm": (slurm(3, JTRAIN_PROCESSES="1"), "jtrain: 0 of 1 at None"),
    "torchrun under slurm": (TORCHRUN | slurm(1), "torchrun: 9 of 16 at 10.0.0.1:29501"),
}  # fmt: skip


@pytest.mark.parametrize("launcher", dict.fromkeys(name.partition(",")[0] for name in ROWS))
def test_a_recorded_environment_defines_the_cluster(launcher: str):
    for name, (environ, expected) in ROWS.items():
        if name.partition(",")[0] == launcher:
            found = detect(environ)
            said = f"{found.kind}: {found.index} of {found.processes} at {found.coordinator}"
            said += f", devices {','.join(map(str, found.devices))}" if found.devices else ""
            assert said == expected, name
            assert found.by.items() <= environ.items(), name
            evaluates = '"type": "evaluator"' in str(found.by)
            assert found.role == ("evaluates" if evaluates else "trains")


def test_every_kind_has_a_recorded_environment():
    for kind in KINDS:
        assert any(set(kind.variables) & environ.keys() for environ, _ in ROWS.values()), kind.name


def test_the_page_lists_every_kind_in_its_order_with_its_variables():
    lines = (Path(__file__).parents[3] / "docs/clusters.md").read_text().splitlines()
    first = lines.index("| | recognised by | process 0 is at |") + 2
    rows = [line.strip("| ").split(" | ") for line in lines[first : first + len(KINDS)]]
    for kind, (name, marks, _) in zip(KINDS, rows, strict=True):
        assert name.startswith(kind.name)
        assert {f"`{variable}`" for variable in kind.variables} <= set(re.findall(r"`\w+`", marks))
    assert lines[first + len(KINDS)].startswith("| a TPU VM |")
    assert not lines[first + len(KINDS) + 1].startswith("|"), "and no other"


def test_notes_other_clusters_in_the_environment():
    assert "Slurm is set too" in detect(TORCHRUN | slurm(1)).note
    assert "Slurm is set too" in detect(slurm(3, JTRAIN_PROCESSES="1")).note
    assert detect(MPI_5 | {"JTRAIN_COORDINATOR": "n1:1"}).note == "", "its own PMIx is not another"
    assert "Kubernetes JobSet is set too" in detect(TPU | job_set(2)).note


WRONG = {
    "TF_CONFIG is not JSON: Expecting value": {"TF_CONFIG": "worker:0"},
    "tasks of type ps, and no task of type chief.* Set a chief": tf_config("worker", 0,
        worker=["b:1", "c:1"], ps=["d:1", "e:1"]),
    "`task` one of those, counted from 0. Set TF_CONFIG=": tf_config("worker", -1),
    "jtrain is half set: JTRAIN_PROCESSES=2 is set, and JTRAIN_PROCESS is missing": without(OWN,
        "JTRAIN_PROCESS"),
    r"this is process 2 of 2.*JTRAIN_PROCESS=2.*Set an index in 0 .. 1": OWN
    | {"JTRAIN_PROCESS": "2"},
    "JTRAIN_PROCESSES should be a number from 0 on and is 'two'": OWN | {"JTRAIN_PROCESSES": "two"},
    "Slurm is half set: .* SLURM_PROCID is missing": without(slurm(1), "SLURM_PROCID"),
    r"task 0 is on node02, and the list begins with node01.*=NODE:62055 srun": slurm(0,
        SLURM_NODEID="1", SLURMD_NODENAME="node02"),
    r"Open MPI started 2 processes on several .* mpirun -x JTRAIN_COORDINATOR": MPI_5,
    r"PMIx started this process as number 1 .*PMIX_RANK=1.* prterun -x JTRAIN_PROCESSES=4": PRRTE,
    r"pod as number 0 .*JTRAIN_COORDINATOR=JOB-0.SERVICE:8476.*JTRAIN_PROCESSES=1 if each": (
        INDEXED_JOB | {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-node-of-hostNetwork"}
    ),
    "JTRAIN_PROCESSES=2, and Slurm started 4": slurm(3, JTRAIN_PROCESSES="2"),
    # One process within each of several.
    "torchrun is one process .*, and Slurm started several .*each would train by itself": slurm(2)
    | TORCHRUN
    | {"WORLD_SIZE": "1", "RANK": "0"},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_reports_an_invalid_environment(message: str):
    with pytest.raises(ConfigError, match=message) as error:
        detect(WRONG[message])
    assert any(word in str(error.value) for word in ("Set ", "Unset", "Leave"))


BATCH = env("SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_JOB_NUM_NODES=2")
LSF = env("LSB_JOBID=4711 LSB_DJOB_NUMPROC=16") | {"LSB_MCPU_HOSTS": "node1 8 node2 8"}


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


def test_a_pbs_script_is_warned_of_and_the_advice_ends_each_warning(pbs: dict[str, str]):
    (line,) = detect(pbs).describe()
    assert line.startswith("a job of PBS on 2 hosts, and this process trains by itself on one")
    by_hand = {"JTRAIN_COORDINATOR": "node1:8476", "JTRAIN_PROCESSES": "2", "JTRAIN_PROCESS": "1"}
    for environ in (BATCH, LSF, pbs, pbs | {"PBS_NODENUM": "1"}):
        assert detect(environ | by_hand).processes == 2
        alone = detect(environ | {"JTRAIN_PROCESSES": "1"})
        assert (alone.processes, alone.describe()) == (1, [])


def test_one_process_is_not_warned_of():
    for environ in (
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "web-6b7f8c9d4-x2x7k"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"COORDINATOR_ADDRESS": "http://broker:1234"},
    ):
        found = detect(environ)
        assert (found.kind, found.processes, found.describe()) == ("one process", 1, [])


def test_compact_lists_of_slurm():
    assert parse_hosts("node[8-11]") == ["node8", "node9", "node10", "node11"]
    assert parse_hosts("node[099-100]") == ["node099", "node100"]
    assert parse_hosts("gpu[1,3],login.net") == ["gpu1", "gpu3", "login.net"]
    assert parse_hosts("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    for text in ("", "node[", "node[a-b]", "a,,b"):
        with pytest.raises(ConfigError, match=r"list of hosts.*Set JTRAIN_COORDINATOR"):
            parse_hosts(text)
    assert parse_tasks("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match=r"such as 2\(x4\),1, and is '2x3'"):
        parse_tasks("2x3")
