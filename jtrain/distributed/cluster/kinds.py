"""Kinds of clusters, each by the variables that its launcher sets; the first one counts."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jtrain.distributed.cluster.cloud import read_aws_batch, read_sky_pilot
from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress
from jtrain.distributed.cluster.kubernetes import read_jax_job, read_job, read_job_set
from jtrain.distributed.cluster.mpi import (
    read_jsrun,
    read_mpich,
    read_open_mpi,
    read_pmi,
    read_pmix,
)
from jtrain.distributed.cluster.slurm import read_slurm
from jtrain.distributed.cluster.tf_config import read_tf_config
from jtrain.distributed.cluster.tpu import read_tpu
from jtrain.distributed.cluster.variables import ClusterVariables


class ClusterKind(NamedTuple):
    """A kind of cluster."""

    name: str
    marks: tuple[str, ...]
    """The kind is recognised if any of these variables is set."""
    read: Callable[[ClusterVariables], Cluster]
    needs: tuple[str, ...] = ()
    """The kind is recognised only if all of these are set too."""
    counts: tuple[str, ...] = ()
    """Numbers of processes; one above 1 is a sign of the kind, if no kind is recognised."""
    indexes: tuple[str, ...] = ()
    """Numbers of this process; one above 0 is a sign of the kind, if no kind is recognised."""
    common: bool = False
    """Whether other programs use its names, so that a part of them is no sign."""
    quiet: bool = False
    """Whether other kinds set its variables too, so that no note mentions it."""

    def matches(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables define this kind."""
        return any(map(environ.get, self.marks)) and all(map(environ.get, self.needs))

    def counts_several(self, environ: Mapping[str, str]) -> bool:
        """Return whether a number says that this is one of several processes."""
        numbers = [(name, 1) for name in self.counts] + [(name, 0) for name in self.indexes]
        values = ((environ.get(name, "").strip(), least) for name, least in numbers)
        return any(value.isdigit() and int(value) > least for value, least in values)


def _jtrain(env: ClusterVariables) -> Cluster:
    """Read jtrain's own variables; JTRAIN_PROCESSES=1 alone is a process that trains by itself."""
    if env.get("JTRAIN_PROCESSES") == "1" and not env.get("JTRAIN_COORDINATOR"):
        return Cluster(kind="jtrain", index=env.number("JTRAIN_PROCESS", 0), by=env.used)
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
        devices=env.local_gpus(env.number("LOCAL_RANK", 0), env.number("LOCAL_WORLD_SIZE", 1)),
        by=env.used,
    )


def _jax(env: ClusterVariables) -> Cluster:
    """Read JAX's own variables, which Kubeflow Trainer sets for the pods of a TrainJob.

    xpk sets the address alone, beside numbers of its own: NNODES and NODE_RANK for pods with GPUs,
    JAX_PROCESS_COUNT and PROCESSES_IN_JOB for pods without. Source: AI-Hypercomputer/xpk,
    src/xpk/core/docker_resources.py.
    """
    processes, index = _jax_numbers(env)
    address = env.text("JAX_COORDINATOR_ADDRESS")
    if not re.search(r":\d+$", address):
        by_cpus = env.get("JAX_PROCESS_COUNT")  # then the port is free to choose
        port = env.get("JAX_COORDINATOR_PORT") if by_cpus else env.text("JAX_COORDINATOR_PORT")
        address = f"{address}:{port or PORT}"
    return Cluster(
        kind="JAX environment",
        processes=processes,
        index=index,
        coordinator=CoordinatorAddress.parse(address, "JAX_COORDINATOR_ADDRESS"),
        by=env.used,
    )


def _jax_numbers(env: ClusterVariables) -> tuple[int, int]:
    """Return the number of processes, and of this one."""
    if not env.get("JAX_NUM_PROCESSES"):
        if env.get("NODE_RANK") and env.get("NNODES"):
            return env.number("NNODES"), env.number("NODE_RANK")
        if env.get("JAX_PROCESS_COUNT") and env.get("PROCESSES_IN_JOB"):
            before = env.number("JOB_INDEX", 0) * env.number("PROCESSES_IN_JOB")
            return env.number("JAX_PROCESS_COUNT"), before + env.number("JOB_COMPLETION_INDEX")
    return env.number("JAX_NUM_PROCESSES"), env.number("JAX_PROCESS_ID")


KINDS = (
    ClusterKind("jtrain", ("JTRAIN_COORDINATOR", "JTRAIN_PROCESSES", "JTRAIN_PROCESS"), _jtrain),
    ClusterKind("TF_CONFIG", ("TF_CONFIG",), read_tf_config),
    ClusterKind(
        "torchrun",
        ("MASTER_ADDR",),
        _torchrun,
        needs=("RANK",),  # a script under srun sets the others for PyTorch
        counts=("WORLD_SIZE",),
        indexes=("RANK",),
    ),
    ClusterKind(
        "JAX environment",
        ("JAX_COORDINATOR_ADDRESS",),
        _jax,
        counts=("JAX_NUM_PROCESSES",),
        indexes=("JAX_PROCESS_ID",),
    ),
    ClusterKind(
        "Kubeflow JAXJob",
        ("COORDINATOR_ADDRESS",),
        read_jax_job,
        needs=("COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"),
        counts=("NUM_PROCESSES",),
        common=True,
    ),
    ClusterKind(
        "LSF jsrun",
        ("JSM_NAMESPACE_SIZE",),
        read_jsrun,
        counts=("JSM_NAMESPACE_SIZE",),
        indexes=("JSM_NAMESPACE_RANK",),
    ),
    ClusterKind(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE",),
        read_open_mpi,
        counts=("OMPI_COMM_WORLD_SIZE",),
        indexes=("OMPI_COMM_WORLD_RANK",),
    ),
    ClusterKind("MPICH", ("MPI_LOCALNRANKS",), read_mpich, counts=("PMI_SIZE",)),
    ClusterKind(
        "Slurm",
        ("SLURM_STEP_NODELIST",),
        read_slurm,
        counts=("SLURM_STEP_NUM_TASKS",),
        indexes=("SLURM_PROCID",),
    ),
    ClusterKind(
        "TPU",
        ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        read_tpu,
        counts=("MEGASCALE_NUM_SLICES",),
        indexes=("TPU_WORKER_ID", "MEGASCALE_SLICE_ID"),
    ),
    ClusterKind(
        "AWS Batch",
        ("AWS_BATCH_JOB_NUM_NODES",),
        read_aws_batch,
        counts=("AWS_BATCH_JOB_NUM_NODES",),
        indexes=("AWS_BATCH_JOB_NODE_INDEX",),
    ),
    ClusterKind(
        "Kubernetes JobSet",
        ("JOBSET_NAME",),
        read_job_set,
        counts=("PODS_PER_JOB",),
        indexes=("JOB_COMPLETION_INDEX",),
    ),
    ClusterKind(
        "SkyPilot",
        ("SKYPILOT_NODE_IPS",),
        read_sky_pilot,
        counts=("SKYPILOT_NUM_NODES",),
        indexes=("SKYPILOT_NODE_RANK",),
    ),
    ClusterKind("PMI", ("PMI_SIZE",), read_pmi, counts=("PMI_SIZE",), quiet=True),
    ClusterKind("PMIx", ("PMIX_RANK",), read_pmix, indexes=("PMIX_RANK",), quiet=True),
    ClusterKind(
        "Kubernetes Job",
        ("JOB_COMPLETION_INDEX",),
        read_job,
        indexes=("JOB_COMPLETION_INDEX",),
        quiet=True,
    ),
)
