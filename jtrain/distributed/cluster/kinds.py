"""The kinds of clusters that are known, a row each: how one is recognised, and how it is read.

The first that is recognised counts, so what is nearer to the process stands before what is around
it: `torchrun` may have been started by Slurm.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.hostlist import hosts, tasks
from jtrain.distributed.cluster.tf_config import tf_config
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError

PORT = 8476  # where nothing says another; what TPUs use, too


class ClusterKind(NamedTuple):
    """A kind of cluster."""

    name: str
    marks: tuple[str, ...]
    """Variables of which any one that is set says that this is it."""
    read: Callable[[ClusterVariables], Cluster]


def _own(said: ClusterVariables) -> Cluster:
    return Cluster(
        kind="jtrain",
        processes=said.number("JTRAIN_PROCESSES"),
        index=said.number("JTRAIN_PROCESS"),
        coordinator=CoordinatorAddress.parse(said.text("JTRAIN_COORDINATOR"), "JTRAIN_COORDINATOR"),
        by=said.seen,
    )


def _torchrun(said: ClusterVariables) -> Cluster:
    """One port beyond that of torchrun, at which its own store answers."""
    return Cluster(
        kind="torchrun",
        processes=said.number("WORLD_SIZE"),
        index=said.number("RANK"),
        coordinator=CoordinatorAddress(
            said.text("MASTER_ADDR"), said.number("MASTER_PORT", PORT) + 1
        ),
        devices=_share(said, said.number("LOCAL_RANK", 0), said.number("LOCAL_WORLD_SIZE", 1)),
        by=said.seen,
    )


def _open_mpi(said: ClusterVariables) -> Cluster:
    processes, index = said.number("OMPI_COMM_WORLD_SIZE"), said.number("OMPI_COMM_WORLD_RANK")
    local, beside = (said.number(f"OMPI_COMM_WORLD_LOCAL_{x}", y) for x, y in _LOCAL)
    uri = said.get("OMPI_MCA_orte_hnp_uri")
    host = re.search(r"tcp://([^,:]+)", uri)
    if beside == processes:  # all are on this machine
        where = CoordinatorAddress("127.0.0.1", PORT)
    elif host:
        where = CoordinatorAddress(host[1], _port(uri.partition(".")[0], 1 << 12))
    else:
        raise ConfigError(
            f"Open MPI started {processes} processes on several machines and does not say where "
            f"the first is ({', '.join(said.seen)}). Set JTRAIN_COORDINATOR=HOST:{PORT}, "
            f"JTRAIN_PROCESSES and JTRAIN_PROCESS: mpirun -x JTRAIN_COORDINATOR ..."
        )
    devices = _share(said, local, beside)
    return Cluster(
        kind="Open MPI",
        processes=processes,
        index=index,
        coordinator=where,
        devices=devices,
        by=said.seen,
    )


_LOCAL = (("RANK", 0), ("SIZE", 1))


def _slurm(said: ClusterVariables) -> Cluster:
    """A step of a job: what `srun` starts. Its hosts are in the order of its tasks."""
    processes = said.number("SLURM_STEP_NUM_TASKS", said.number("SLURM_NTASKS", 1))
    nodes = hosts(said.text("SLURM_STEP_NODELIST"))
    spelt = said.get("SLURM_STEP_TASKS_PER_NODE") or said.get("SLURM_TASKS_PER_NODE", "1")
    on_node = tasks(spelt)
    node = said.number("SLURM_NODEID", 0)
    beside = on_node[node] if node < len(on_node) else 1
    bound = said.get("SLURM_GPUS_PER_TASK") or said.get("SLURM_NTASKS_PER_GPU")
    return Cluster(
        kind="Slurm",
        processes=processes,
        index=said.number("SLURM_PROCID"),
        coordinator=CoordinatorAddress(nodes[0], _port(said.text("SLURM_JOB_ID"))),
        devices=() if bound else _share(said, said.number("SLURM_LOCALID", 0), beside),
        by=said.seen,
    )


def _tpu(said: ClusterVariables) -> Cluster:
    """A process a host of one slice, or of several."""
    workers = said.text("TPU_WORKER_HOSTNAMES").split(",")
    slices, slice_ = said.number("MEGASCALE_NUM_SLICES", 1), said.number("MEGASCALE_SLICE_ID", 0)
    worker = said.number("TPU_WORKER_ID")
    if worker >= len(workers):
        raise ConfigError(
            f"TPU_WORKER_ID={worker} and TPU_WORKER_HOSTNAMES names {len(workers)} hosts, which "
            f"count from 0. Set both as the slice has them."
        )
    first = said.get("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else workers[0]
    host = first.partition(":")[0] or said.text("MEGASCALE_COORDINATOR_ADDRESS")
    return Cluster(
        kind="TPU slice" if slices == 1 else f"{slices} TPU slices",
        processes=slices * len(workers),
        index=slice_ * len(workers) + worker,
        coordinator=CoordinatorAddress(host, PORT),
        by=said.seen,
    )


def _job_set(said: ClusterVariables) -> Cluster:
    """The pods of one replicated job of a JobSet; the names of its pods are known beforehand."""
    name, job = said.text("JOBSET_NAME"), said.text("REPLICATED_JOB_NAME")
    pods, jobs = said.number("PODS_PER_JOB"), said.number("JOBS", 1)
    index = said.number("JOB_INDEX", 0) * pods + said.number("JOB_COMPLETION_INDEX")
    return Cluster(
        kind="Kubernetes JobSet",
        processes=pods * jobs,
        index=index,
        coordinator=CoordinatorAddress(f"{name}-{job}-0-0.{name}", PORT),
        by=said.seen,
    )


KINDS = (
    ClusterKind("jtrain", ("JTRAIN_COORDINATOR", "JTRAIN_PROCESSES", "JTRAIN_PROCESS"), _own),
    ClusterKind("TF_CONFIG", ("TF_CONFIG",), tf_config),
    ClusterKind("torchrun", ("MASTER_ADDR",), _torchrun),
    ClusterKind("Open MPI", ("OMPI_COMM_WORLD_SIZE",), _open_mpi),
    ClusterKind("Slurm", ("SLURM_STEP_NODELIST",), _slurm),
    ClusterKind("TPU", ("TPU_WORKER_HOSTNAMES",), _tpu),
    ClusterKind("Kubernetes JobSet", ("JOBSET_NAME",), _job_set),
)


def _port(job: str, unit: int = 1) -> int:
    """A port for a job, above those that systems lend: two jobs on a node hardly ever share one."""
    return 61440 + (int(job) // unit if job.isdigit() else 0) % 4096


def _share(said: ClusterVariables, local: int, beside: int) -> tuple[int, ...]:
    """The GPUs of one of several processes on a machine that all see the same ones; () for all."""
    seen = [gpu for gpu in said.get("CUDA_VISIBLE_DEVICES").split(",") if gpu]
    each, rest = divmod(len(seen), beside)
    if beside == 1 or not each or rest:
        return ()
    return tuple(range(local * each, (local + 1) * each))
