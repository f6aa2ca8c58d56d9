"""Detection of the cluster from the environment.

The kinds of clusters are a table, each by the variables that its launcher sets; the first one
counts. A process that no launcher numbered may be one of several all the same: a scheduler gave
several machines or tasks, and the process was started without its launcher. It would train by
itself, and so would each of its like; `find_sign` finds the signs of that.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jtrain.distributed.cluster.cluster import PORT, Cluster, ClusterVariables, CoordinatorAddress
from jtrain.distributed.cluster.environments import (
    detect_tpu_vm,
    read_aws_batch,
    read_jax,
    read_jax_job,
    read_job_set,
    read_sky_pilot,
    read_tf_config,
    read_tpu,
)
from jtrain.distributed.cluster.schedulers import (
    Reader,
    find_lsf_node,
    find_open_mpi_node,
    read_job,
    read_pmix,
    read_ranks,
    read_slurm,
)
from jtrain.errors import ConfigError
from jtrain.io.regular_files import read_bytes


class ClusterKind(NamedTuple):
    """A kind of cluster."""

    name: str
    read: Reader
    marks: str
    """The kind is recognised if any of these variables is set, or all that are joined by `+`."""
    counts: str = ""
    """Number of processes, and of this one after a space: signs of several above 1, and above 0."""
    common: bool = False
    """Whether other programs use its names, so that a part of them is not a sign."""
    quiet: bool = False
    """Whether other kinds set its variables too, so that no note mentions it."""

    @property
    def variables(self) -> list[str]:
        """The variables by which it is recognised."""
        return self.marks.replace("+", " ").split()

    def matches(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables define this kind."""
        return any(all(map(environ.get, mark.split("+"))) for mark in self.marks.split())

    def counts_several(self, environ: Mapping[str, str]) -> bool:
        """Return whether a number says that this is one of several processes."""
        size, rank, *_ = *self.counts.split(" "), ""
        return _above(environ, size, 1) or _above(environ, rank, 0)

    def is_partly_set(self, environ: Mapping[str, str]) -> bool:
        """Return whether a part of the variables is set, such as only a process's number."""
        marked = any(environ.get(mark.split("+")[0]) for mark in self.marks.split())
        return not self.common and (marked or self.counts_several(environ))


def _above(environ: Mapping[str, str], name: str, least: int) -> bool:
    value = environ.get(name, "").strip()
    return value.isdigit() and int(value) > least


def _read_jtrain(env: ClusterVariables) -> Cluster:
    """Read jtrain's own variables; JTRAIN_PROCESSES=1 alone is a process that trains by itself."""
    if env.get("JTRAIN_PROCESSES") == "1" and not env.get("JTRAIN_COORDINATOR"):
        return Cluster(index=env.number("JTRAIN_PROCESS", 0))
    processes, index = env.number("JTRAIN_PROCESSES"), env.number("JTRAIN_PROCESS")
    env.text("JTRAIN_COORDINATOR")
    return Cluster(processes=processes, index=index, coordinator=env.coordinator())


def _read_torchrun(env: ClusterVariables) -> Cluster:
    """Read a torchrun cluster; the port is torchrun's plus one: its own store uses that port."""
    host, port = env.text("MASTER_ADDR"), env.number("MASTER_PORT", PORT) + 1
    return Cluster(
        processes=env.number("WORLD_SIZE"),
        index=env.number("RANK"),
        coordinator=CoordinatorAddress(host, port),
        devices=env.local_gpus(env.number("LOCAL_RANK", 0), env.number("LOCAL_WORLD_SIZE", 1)),
    )


_RANKS = "{0}_SIZE {0}_RANK {0}_LOCAL_SIZE {0}_LOCAL_RANK"
_OPEN_MPI, _JSRUN, _PMI = map(_RANKS.format, ("OMPI_COMM_WORLD", "JSM_NAMESPACE", "PMI"))
_HYDRA = "PMI_SIZE PMI_RANK MPI_LOCALNRANKS MPI_LOCALRANKID"  # of MPICH and Intel MPI
_read_jsrun = read_ranks(_JSRUN, "jsrun -E JTRAIN_COORDINATOR=HOST:8476 ...", find_lsf_node)
_read_open_mpi = read_ranks(_OPEN_MPI, "mpirun -x JTRAIN_COORDINATOR ...", find_open_mpi_node)
_read_mpich = read_ranks(_HYDRA, "mpiexec -genv JTRAIN_COORDINATOR HOST:8476 ...")
_read_pmi = read_ranks(_PMI, "mpiexec --env JTRAIN_COORDINATOR=HOST:8476 ...")  # Cray's PALS

KINDS = (
    ClusterKind("jtrain", _read_jtrain, "JTRAIN_COORDINATOR JTRAIN_PROCESSES JTRAIN_PROCESS"),
    ClusterKind("TF_CONFIG", read_tf_config, "TF_CONFIG"),
    # A script under srun sets the others for PyTorch.
    ClusterKind("torchrun", _read_torchrun, "MASTER_ADDR+RANK", "WORLD_SIZE RANK"),
    ClusterKind(
        "JAX environment", read_jax, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES JAX_PROCESS_ID"
    ),
    ClusterKind(
        "Kubeflow JAXJob",
        read_jax_job,
        "COORDINATOR_ADDRESS+COORDINATOR_PORT+NUM_PROCESSES+PROCESS_ID",
        common=True,
    ),
    ClusterKind("LSF jsrun", _read_jsrun, "JSM_NAMESPACE_SIZE", _JSRUN),
    ClusterKind("Open MPI", _read_open_mpi, "OMPI_COMM_WORLD_SIZE", _OPEN_MPI),
    ClusterKind("MPICH", _read_mpich, "MPI_LOCALNRANKS", "PMI_SIZE"),
    ClusterKind("Slurm", read_slurm, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS SLURM_PROCID"),
    ClusterKind(
        "TPU",
        read_tpu,
        "TPU_WORKER_HOSTNAMES TPU_PROCESS_ADDRESSES",
        "MEGASCALE_NUM_SLICES TPU_WORKER_ID",
    ),
    ClusterKind(
        "AWS Batch",
        read_aws_batch,
        "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_NUM_NODES AWS_BATCH_JOB_NODE_INDEX",
    ),
    ClusterKind(
        "Kubernetes JobSet", read_job_set, "JOBSET_NAME", "PODS_PER_JOB JOB_COMPLETION_INDEX"
    ),
    ClusterKind(
        "SkyPilot", read_sky_pilot, "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES SKYPILOT_NODE_RANK"
    ),
    ClusterKind("PMI", _read_pmi, "PMI_SIZE", "PMI_SIZE", quiet=True),
    ClusterKind("PMIx", read_pmix, "PMIX_RANK", " PMIX_RANK", quiet=True),
    ClusterKind(
        "Kubernetes Job", read_job, "JOB_COMPLETION_INDEX", " JOB_COMPLETION_INDEX", quiet=True
    ),
)


def detect(environ: Mapping[str, str], *, root: Path = Path("/")) -> Cluster:
    """Return the cluster that the environment variables define; one process if they define none.

    A TPU VM asks its metadata server if no variable defines a cluster.

    Raises:
        ConfigError: if variables are incomplete, malformed or contradictory.
    """
    found = [kind for kind in KINDS if kind.matches(environ)]
    if not found:
        found = [kind for kind in KINDS if kind.is_partly_set(environ)]
    if not found:
        return detect_tpu_vm(environ, root) or Cluster(warning=find_sign(environ))
    numbered = environ.get("JTRAIN_PROCESS") or environ.get("JTRAIN_PROCESSES") == "1"
    if found[0].name == "jtrain" and len(found) > 1 and not numbered:
        del found[0]  # jtrain's variables only change what a launcher says: its address, say
    kind, *outer = found
    env = ClusterVariables(environ, kind.name)
    cluster = kind.read(env)
    if kind.name != "jtrain":
        processes = env.number("JTRAIN_PROCESSES", cluster.processes)
        if processes != cluster.processes:
            raise ConfigError(
                f"JTRAIN_PROCESSES={processes}, and {kind.name} started {cluster.processes} "
                f"processes. Unset JTRAIN_PROCESSES, or set JTRAIN_PROCESS and JTRAIN_COORDINATOR "
                f"too."
            )
        coordinator = env.coordinator() or cluster.coordinator
        cluster = dataclasses.replace(cluster, coordinator=coordinator)
    name = kind.name if cluster.kind == Cluster.kind else cluster.kind
    others = " and ".join(other.name for other in outer if not other.quiet)
    note = f"{others} is set too; {kind.name} takes precedence" if others else ""
    cluster = dataclasses.replace(cluster, kind=name, by=env.used, note=note)
    if not 0 <= cluster.index < cluster.processes:
        raise ConfigError(
            f"{name}: this is process {cluster.index} of {cluster.processes}, and indexes count "
            f"from 0 ({cluster.variables}). Set an index in 0 .. {cluster.processes - 1}, or as "
            f"many processes as are started."
        )
    if kind.name != "jtrain":
        _check_not_alone(cluster, outer, environ)
    return cluster


def _check_not_alone(
    cluster: Cluster, outer: list[ClusterKind], environ: Mapping[str, str]
) -> None:
    """Raise ConfigError if a launcher started one process within each of several."""
    several = [kind for kind in outer if kind.counts_several(environ)]
    if cluster.processes > 1 or cluster.role != "trains" or not several:
        return
    kind = several[0]
    names = [x for x in (*kind.variables, *kind.counts.split()[:2]) if environ.get(x)]
    seen = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names))
    raise ConfigError(
        f"{cluster.kind} is one process ({cluster.variables}), and {kind.name} started several "
        f"({seen}), so that each would train by itself. Unset {', '.join(cluster.by)} to train in "
        f"all of them, or set JTRAIN_PROCESSES=1 if each trains by itself."
    )


def find_sign(environ: Mapping[str, str]) -> str:
    """Return a warning about a job of several processes; empty without one."""
    for name, unit in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
        if "SLURM_JOB_ID" in environ and _above(environ, name, 1):
            return f"a Slurm job of {environ[name]} {unit}, {_not_started_by('srun')}"
    try:
        pbs = read_bytes(Path(environ.get("PBS_NODEFILE") or "/none"), most=1 << 26).split()
    except (OSError, ValueError):
        pbs = []
    lsf = environ.get("LSB_MCPU_HOSTS", "").split()[::2]
    for scheduler, hosts, launcher in (("PBS", pbs, "mpiexec"), ("LSF", lsf, "jsrun or mpirun")):
        if len(set(hosts)) > 1:
            return (
                f"a job of {scheduler} on {len(set(hosts))} hosts, and this process trains by "
                f"itself on one of them: start it by {launcher}, or set "
                f"JTRAIN_COORDINATOR=HOST:{PORT}, JTRAIN_PROCESSES and JTRAIN_PROCESS for each"
            )
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        return f"this is the launcher of a Kubeflow MPIJob, {_not_started_by('mpirun')}"
    return ""


def _not_started_by(launcher: str) -> str:
    return (
        f"and {launcher} did not start this process, so that it trains by itself: type "
        f"{launcher} before it"
    )
