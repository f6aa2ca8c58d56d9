"""Detection of the cluster from the environment.

The kinds of clusters are a table, each by the variables that its launcher sets; the first one
counts. A process that no launcher numbered may be one of several all the same: a scheduler gave
several machines or tasks, and the process was started without its launcher. It would train by
itself, and so would each of its like; `find_sign` finds the signs of that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jtrain.distributed.cluster.cluster import PORT, Cluster, ClusterVariables, CoordinatorAddress
from jtrain.distributed.cluster.environments import (
    detect_tpu_vm,
    read_aws_batch,
    read_jax_job,
    read_job,
    read_job_set,
    read_sky_pilot,
    read_tf_config,
    read_tpu,
)
from jtrain.distributed.cluster.schedulers import (
    read_jsrun,
    read_mpich,
    read_open_mpi,
    read_pmi,
    read_pmix,
    read_slurm,
)
from jtrain.errors import ConfigError
from jtrain.io.regular_files import read_bytes


class ClusterKind(NamedTuple):
    """A kind of cluster."""

    name: str
    marks: tuple[str, ...]
    """The kind is recognised if any of these variables is set."""
    read: Callable[[ClusterVariables], Cluster]
    size: str = ""
    """Number of processes; above 1 it is a sign of the kind, if no kind is recognised."""
    rank: str = ""
    """Number of this process; above 0 it is a sign of the kind, if no kind is recognised."""
    needs: tuple[str, ...] = ()
    """The kind is recognised only if all of these are set too."""
    common: bool = False
    """Whether other programs use its names, so that a part of them is no sign."""
    quiet: bool = False
    """Whether other kinds set its variables too, so that no note mentions it."""

    def matches(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables define this kind."""
        return any(map(environ.get, self.marks)) and all(map(environ.get, self.needs))

    def counts_several(self, environ: Mapping[str, str]) -> bool:
        """Return whether a number says that this is one of several processes."""
        values = ((environ.get(self.size, ""), 1), (environ.get(self.rank, ""), 0))
        return any(value.strip().isdigit() and int(value) > least for value, least in values)


def _jtrain(env: ClusterVariables) -> Cluster:
    """Read jtrain's own variables; JTRAIN_PROCESSES=1 alone is a process that trains by itself."""
    if env.get("JTRAIN_PROCESSES") == "1" and not env.get("JTRAIN_COORDINATOR"):
        return env.cluster(1, env.number("JTRAIN_PROCESS", 0), None)
    processes, index = env.number("JTRAIN_PROCESSES"), env.number("JTRAIN_PROCESS")
    env.text("JTRAIN_COORDINATOR")
    return env.cluster(processes, index, env.coordinator())


def _torchrun(env: ClusterVariables) -> Cluster:
    """Read a torchrun cluster; the port is torchrun's plus one: its own store uses that port."""
    processes, index = env.number("WORLD_SIZE"), env.number("RANK")
    where = CoordinatorAddress(env.text("MASTER_ADDR"), env.number("MASTER_PORT", PORT) + 1)
    devices = env.local_gpus(env.number("LOCAL_RANK", 0), env.number("LOCAL_WORLD_SIZE", 1))
    return env.cluster(processes, index, where, devices=devices)


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
    where = CoordinatorAddress.parse(address, "JAX_COORDINATOR_ADDRESS")
    return env.cluster(processes, index, where)


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
    # A script under srun sets the others for PyTorch.
    ClusterKind("torchrun", ("MASTER_ADDR",), _torchrun, "WORLD_SIZE", "RANK", needs=("RANK",)),
    ClusterKind(
        "JAX environment", ("JAX_COORDINATOR_ADDRESS",), _jax, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    ),
    ClusterKind(
        "Kubeflow JAXJob",
        ("COORDINATOR_ADDRESS",),
        read_jax_job,
        "NUM_PROCESSES",
        needs=("COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"),
        common=True,
    ),
    ClusterKind(
        "LSF jsrun", ("JSM_NAMESPACE_SIZE",), read_jsrun, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"
    ),
    ClusterKind(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE",),
        read_open_mpi,
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
    ),
    ClusterKind("MPICH", ("MPI_LOCALNRANKS",), read_mpich, "PMI_SIZE"),
    ClusterKind(
        "Slurm", ("SLURM_STEP_NODELIST",), read_slurm, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
    ),
    ClusterKind(
        "TPU",
        ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        read_tpu,
        "MEGASCALE_NUM_SLICES",
        "TPU_WORKER_ID",
    ),
    ClusterKind(
        "AWS Batch",
        ("AWS_BATCH_JOB_NUM_NODES",),
        read_aws_batch,
        "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_NODE_INDEX",
    ),
    ClusterKind(
        "Kubernetes JobSet", ("JOBSET_NAME",), read_job_set, "PODS_PER_JOB", "JOB_COMPLETION_INDEX"
    ),
    ClusterKind(
        "SkyPilot",
        ("SKYPILOT_NODE_IPS",),
        read_sky_pilot,
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
    ),
    ClusterKind("PMI", ("PMI_SIZE",), read_pmi, "PMI_SIZE", quiet=True),
    ClusterKind("PMIx", ("PMIX_RANK",), read_pmix, rank="PMIX_RANK", quiet=True),
    ClusterKind(
        "Kubernetes Job",
        ("JOB_COMPLETION_INDEX",),
        read_job,
        rank="JOB_COMPLETION_INDEX",
        quiet=True,
    ),
)


def detect(environ: Mapping[str, str], *, root: Path = Path("/")) -> Cluster:
    """Return the cluster that the environment variables define; one process if they define none.

    A TPU VM asks its metadata server if no variable defines a cluster.

    Args:
        root: root of the file system, which shows TPU chips.

    Raises:
        ConfigError: if variables are incomplete, malformed or contradictory.
    """
    found = [kind for kind in KINDS if kind.matches(environ)]
    if not found:
        found = [kind for kind in KINDS if _is_part(kind, environ)]  # one that is half set
    if not found:
        return detect_tpu_vm(environ, root) or Cluster(warning=find_sign(environ))
    if _only_changes(found, environ):
        del found[0]
    kind, *outer = found
    env = ClusterVariables(environ, kind.name)
    cluster = kind.read(env)
    if kind.name != "jtrain":
        cluster = _with_own(cluster, env)
        _check_not_alone(cluster, outer, environ)
    names = " and ".join(other.name for other in outer if not other.quiet)
    note = f"{names} is set too; {kind.name} takes precedence" if names else cluster.note
    return dataclasses.replace(cluster, note=note)


def _is_part(kind: ClusterKind, environ: Mapping[str, str]) -> bool:
    """Return whether a part of a kind's variables is set, such as only a process's number."""
    marked = any(map(environ.get, kind.marks))
    return not kind.common and (marked or kind.counts_several(environ))


def _only_changes(found: list[ClusterKind], environ: Mapping[str, str]) -> bool:
    """Return whether jtrain's variables only change what a launcher says: its address, say."""
    number = environ.get("JTRAIN_PROCESS") or environ.get("JTRAIN_PROCESSES") == "1"
    return found[0].name == "jtrain" and len(found) > 1 and not number


def _with_own(cluster: Cluster, env: ClusterVariables) -> Cluster:
    """Return the cluster with the coordinator of JTRAIN_COORDINATOR, where it is set."""
    where, processes = env.coordinator(), env.number("JTRAIN_PROCESSES", cluster.processes)
    if processes != cluster.processes:
        raise ConfigError(
            f"JTRAIN_PROCESSES={processes}, and {cluster.kind} started {cluster.processes} "
            f"processes. Unset JTRAIN_PROCESSES, or set JTRAIN_PROCESS and JTRAIN_COORDINATOR too."
        )
    return dataclasses.replace(cluster, coordinator=where or cluster.coordinator, by=env.used)


def _check_not_alone(
    cluster: Cluster, outer: list[ClusterKind], environ: Mapping[str, str]
) -> None:
    """Raise ConfigError if a launcher started one process within each of several."""
    several = [kind for kind in outer if kind.counts_several(environ)]
    if cluster.processes > 1 or cluster.role != "trains" or not several:
        return
    kind = several[0]
    names = [name for name in (*kind.marks, kind.size, kind.rank) if environ.get(name)]
    seen = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names))
    raise ConfigError(
        f"{cluster.kind} is one process ({cluster.variables}), and {kind.name} started several "
        f"({seen}), so that each would train by itself. Unset {', '.join(cluster.by)} to train in "
        f"all of them, or set JTRAIN_PROCESSES=1 if each trains by itself."
    )


_BY_HAND = f"JTRAIN_COORDINATOR=HOST:{PORT}, JTRAIN_PROCESSES and JTRAIN_PROCESS"


def find_sign(environ: Mapping[str, str]) -> str:
    """Return a warning about a job of several processes; empty without one."""
    return _slurm(environ) or _pbs(environ) or _lsf(environ) or _mpi_job(environ)


def _slurm(environ: Mapping[str, str]) -> str:
    tasks, nodes = environ.get("SLURM_NTASKS", ""), environ.get("SLURM_JOB_NUM_NODES", "")
    several = next((f"{n} {of}" for n, of in ((tasks, "tasks"), (nodes, "nodes")) if _many(n)), "")
    if "SLURM_JOB_ID" not in environ or not several:
        return ""
    return (
        f"a Slurm job of {several}, and srun did not start this process, so that it trains by "
        f"itself: type srun before it"
    )


def _pbs(environ: Mapping[str, str]) -> str:
    try:
        hosts = set(read_bytes(Path(environ.get("PBS_NODEFILE") or "/none"), most=1 << 26).split())
    except (OSError, ValueError):
        return ""
    return _alone("PBS", len(hosts), "mpiexec") if len(hosts) > 1 else ""


def _lsf(environ: Mapping[str, str]) -> str:
    hosts = set(environ.get("LSB_MCPU_HOSTS", "").split()[::2])
    return _alone("LSF", len(hosts), "jsrun or mpirun") if len(hosts) > 1 else ""


def _mpi_job(environ: Mapping[str, str]) -> str:
    if environ.get("K_MPI_JOB_ROLE") != "launcher":
        return ""
    return (
        "this is the launcher of a Kubeflow MPIJob, and mpirun did not start this process, so that "
        "it trains by itself: type mpirun before it"
    )


def _alone(scheduler: str, hosts: int, launcher: str) -> str:
    return (
        f"a job of {scheduler} on {hosts} hosts, and this process trains by itself on one of them: "
        f"start it by {launcher}, or set {_BY_HAND} for each"
    )


def _many(number: str) -> bool:
    return number.isdigit() and int(number) > 1
