"""Detection of the cluster from the environment: a function for each kind."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.slurm_nodes import read_nodes
from jtrain.distributed.cluster.tf_config import read_tf_config
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError

PORT = 8476  # the default port; TPUs use it, too
COORDINATOR = "JTRAIN_COORDINATOR"  # by itself it only sets the address of another kind of cluster


class ClusterKind(NamedTuple):
    """A kind of cluster."""

    name: str
    marks: tuple[str, ...]
    """The kind is recognised if any of these variables is set."""
    read: Callable[[ClusterVariables], Cluster]


def _jtrain(env: ClusterVariables) -> Cluster:
    return Cluster(
        kind="jtrain",
        processes=env.number("JTRAIN_PROCESSES"),
        index=env.number("JTRAIN_PROCESS"),
        coordinator=CoordinatorAddress.parse(env.text("JTRAIN_COORDINATOR"), "JTRAIN_COORDINATOR"),
        by=env.used,
    )


def _torchrun(env: ClusterVariables) -> Cluster:
    """Read a torchrun cluster; the port is torchrun's plus one: its own store uses that port."""
    return Cluster(
        kind="torchrun",
        processes=env.number("WORLD_SIZE"),
        index=env.number("RANK"),
        coordinator=CoordinatorAddress(
            env.text("MASTER_ADDR"), env.number("MASTER_PORT", PORT) + 1
        ),
        devices=_local_gpus(env, env.number("LOCAL_RANK", 0), env.number("LOCAL_WORLD_SIZE", 1)),
        by=env.used,
    )


def _jax(env: ClusterVariables) -> Cluster:
    """Read JAX's own variables, which Kubeflow Trainer sets for the pods of a TrainJob."""
    address = env.text("JAX_COORDINATOR_ADDRESS")
    if not re.search(r":\d+$", address):
        address = f"{address}:{env.text('JAX_COORDINATOR_PORT')}"
    return Cluster(
        kind="JAX environment",
        processes=env.number("JAX_NUM_PROCESSES"),
        index=env.number("JAX_PROCESS_ID"),
        coordinator=CoordinatorAddress.parse(address, "JAX_COORDINATOR_ADDRESS"),
        by=env.used,
    )


def _sky_pilot(env: ClusterVariables) -> Cluster:
    """Read the nodes of a SkyPilot task, with one process per node."""
    hosts, nodes = env.text("SKYPILOT_NODE_IPS").split(), env.number("SKYPILOT_NUM_NODES")
    if len(hosts) != nodes:
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={nodes}, and SKYPILOT_NODE_IPS has {len(hosts)} addresses "
            f"({', '.join(hosts)}). Set both to the values of the task, or unset both to run in "
            f"one process."
        )
    return Cluster(
        kind="SkyPilot",
        processes=nodes,
        index=env.number("SKYPILOT_NODE_RANK"),
        coordinator=CoordinatorAddress(hosts[0], PORT),
        by=env.used,
    )


def _mpich(env: ClusterVariables) -> Cluster:
    """Read the processes that MPICH's `mpiexec` started, all of them on this machine."""
    processes, local = env.number("PMI_SIZE"), env.number("MPI_LOCALNRANKS")
    if local != processes:
        raise ConfigError(
            f"MPICH started {processes} processes, {local} of them on this machine, and does not "
            f"say where the first is ({', '.join(env.used)}). Set JTRAIN_COORDINATOR=HOST:{PORT}, "
            f"JTRAIN_PROCESSES={processes} and JTRAIN_PROCESS=$PMI_RANK for each."
        )
    return Cluster(
        kind="MPICH",
        processes=processes,
        index=env.number("PMI_RANK"),
        coordinator=CoordinatorAddress("127.0.0.1", PORT),
        devices=_local_gpus(env, env.number("MPI_LOCALRANKID", 0), local),
        by=env.used,
    )


def _open_mpi(env: ClusterVariables) -> Cluster:
    processes, index = env.number("OMPI_COMM_WORLD_SIZE"), env.number("OMPI_COMM_WORLD_RANK")
    local, local_processes = (env.number(f"OMPI_COMM_WORLD_LOCAL_{x}", y) for x, y in _LOCAL)
    uri = env.get("OMPI_MCA_orte_hnp_uri")
    host = re.search(r"tcp://([^,:]+)", uri)
    if local_processes == processes:  # all are on this machine
        where = CoordinatorAddress("127.0.0.1", PORT)
    elif host:
        where = CoordinatorAddress(host[1], _port(uri.partition(".")[0], 1 << 12))
    else:
        raise ConfigError(
            f"Open MPI started {processes} processes on several machines and does not say where "
            f"the first is ({', '.join(env.used)}). Set JTRAIN_COORDINATOR=HOST:{PORT}, "
            f"JTRAIN_PROCESSES and JTRAIN_PROCESS: mpirun -x JTRAIN_COORDINATOR ..."
        )
    devices = _local_gpus(env, local, local_processes)
    return Cluster(
        kind="Open MPI",
        processes=processes,
        index=index,
        coordinator=where,
        devices=devices,
        by=env.used,
    )


_LOCAL = (("RANK", 0), ("SIZE", 1))


def _slurm(env: ClusterVariables) -> Cluster:
    """Read a step of a Slurm job, which `srun` starts."""
    processes = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
    nodes, node = read_nodes(env, processes), env.number("SLURM_NODEID", 0)
    local_processes = nodes.tasks[node] if node < len(nodes.tasks) else 1
    port = _port(env.text("SLURM_JOB_ID"), step=env.get("SLURM_STEP_ID"))
    if nodes.misplaced and processes > 1 and not env.get(COORDINATOR):
        raise ConfigError(
            f"Slurm's list of the step's nodes is not in the order of its tasks: "
            f"{nodes.misplaced} ({', '.join(nodes.hosts)}). Set the node of task 0 for all tasks: "
            f"{COORDINATOR}=NODE:{port} srun ..."
        )
    bound = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_NTASKS_PER_GPU")
    return Cluster(
        kind="Slurm",
        processes=processes,
        index=env.number("SLURM_PROCID"),
        coordinator=CoordinatorAddress(nodes.hosts[0], port),
        devices=() if bound else _local_gpus(env, env.number("SLURM_LOCALID", 0), local_processes),
        by=env.used,
    )


def _tpu(env: ClusterVariables) -> Cluster:
    """Read one or several TPU slices, with one process per host."""
    workers = env.text("TPU_WORKER_HOSTNAMES").split(",")
    slices, slice_ = env.number("MEGASCALE_NUM_SLICES", 1), env.number("MEGASCALE_SLICE_ID", 0)
    worker = env.number("TPU_WORKER_ID")
    if worker >= len(workers):
        raise ConfigError(
            f"TPU_WORKER_ID={worker}, and TPU_WORKER_HOSTNAMES has only {len(workers)} hosts, "
            f"counted from 0. Set both to the values of the slice."
        )
    first = env.get("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else workers[0]
    host = first.partition(":")[0] or env.text("MEGASCALE_COORDINATOR_ADDRESS")
    return Cluster(
        kind="TPU slice" if slices == 1 else f"{slices} TPU slices",
        processes=slices * len(workers),
        index=slice_ * len(workers) + worker,
        coordinator=CoordinatorAddress(host, PORT),
        by=env.used,
    )


def _job_set(env: ClusterVariables) -> Cluster:
    """Read one replicated job of a JobSet; the names of its pods are known beforehand."""
    name, job = env.text("JOBSET_NAME"), env.text("REPLICATED_JOB_NAME")
    pods, jobs = env.number("PODS_PER_JOB"), env.number("JOBS", 1)
    index = env.number("JOB_INDEX", 0) * pods + env.number("JOB_COMPLETION_INDEX")
    return Cluster(
        kind="Kubernetes JobSet",
        processes=pods * jobs,
        index=index,
        coordinator=CoordinatorAddress(f"{name}-{job}-0-0.{name}", PORT),
        by=env.used,
    )


KINDS = (
    ClusterKind("jtrain", ("JTRAIN_COORDINATOR", "JTRAIN_PROCESSES", "JTRAIN_PROCESS"), _jtrain),
    ClusterKind("TF_CONFIG", ("TF_CONFIG",), read_tf_config),
    ClusterKind("torchrun", ("MASTER_ADDR",), _torchrun),
    ClusterKind("JAX environment", ("JAX_COORDINATOR_ADDRESS",), _jax),
    ClusterKind("Open MPI", ("OMPI_COMM_WORLD_SIZE",), _open_mpi),
    ClusterKind("MPICH", ("MPI_LOCALNRANKS",), _mpich),
    ClusterKind("Slurm", ("SLURM_STEP_NODELIST",), _slurm),
    ClusterKind("TPU", ("TPU_WORKER_HOSTNAMES",), _tpu),
    ClusterKind("Kubernetes JobSet", ("JOBSET_NAME",), _job_set),
    ClusterKind("SkyPilot", ("SKYPILOT_NODE_IPS",), _sky_pilot),
)


def _port(job: str, unit: int = 1, step: str = "") -> int:
    """Return a port for a job, above the ephemeral ports: two jobs on a node rarely share one.

    Steps of one job may run at the same time; 257 keeps them off the ports of the next jobs.
    """
    number = int(job) // unit if job.isdigit() else 0
    return 61440 + (number + 257 * (int(step) if step.isdigit() else 0)) % 4096


def _local_gpus(env: ClusterVariables, local: int, local_processes: int) -> tuple[int, ...]:
    """Return the GPUs of one of several processes that all see the same GPUs; () for all."""
    visible = [gpu for gpu in env.get("CUDA_VISIBLE_DEVICES").split(",") if gpu]
    each, rest = divmod(len(visible), local_processes)
    if local_processes == 1 or not each or rest:
        return ()
    return tuple(range(local * each, (local + 1) * each))


def detect(environ: Mapping[str, str]) -> Cluster:
    """Return the cluster that the environment variables define; one process if they define none.

    Raises:
        ConfigError: if variables are incomplete, malformed or contradictory.
    """
    found = [kind for kind in KINDS if any(environ.get(mark) for mark in kind.marks)]
    if not found:
        return Cluster(note=_not_a_step(environ))
    kind, *outer = found
    if outer and {mark for mark in kind.marks if environ.get(mark)} == {COORDINATOR}:
        kind, *outer = outer
        cluster = _at_address(kind, environ)
    else:
        cluster = kind.read(ClusterVariables(environ, kind.name))
    if not outer:
        return cluster
    names = " and ".join(other.name for other in outer)
    return dataclasses.replace(cluster, note=f"{names} is set too; {kind.name} takes precedence")


def _at_address(kind: ClusterKind, environ: Mapping[str, str]) -> Cluster:
    """Read a cluster whose process 0 is at the address that the user names."""
    env = ClusterVariables(environ, kind.name)
    address = CoordinatorAddress.parse(env.text(COORDINATOR), COORDINATOR)
    return dataclasses.replace(kind.read(env), coordinator=address)


def _not_a_step(environ: Mapping[str, str]) -> str:
    """Return a note about a Slurm job whose processes srun did not start."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" not in environ or tasks == "1":
        return ""
    return f"a Slurm job of {tasks} tasks, and srun did not start this process: type srun before it"
