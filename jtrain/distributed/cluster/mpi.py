"""Processes that an MPI launcher started: Open MPI, MPICH, jsrun, and any that speaks PMI or PMIx.

None of them needs an MPI library here: their variables number the processes. Most of them do not
say where process 0 is; then JTRAIN_COORDINATOR does, which they hand to all processes (`-x` of Open
MPI, `-genv` of MPICH).
"""

import re

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress, job_port
from jtrain.distributed.cluster.hostlist import parse_hosts
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError

_HNP = re.compile(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)")


def read_open_mpi(env: ClusterVariables) -> Cluster:
    """Read the processes that Open MPI's `mpirun` started.

    Version 4 gives the address of `mpirun` and the names of its nodes; version 5 gives neither.
    """
    processes, index = env.number("OMPI_COMM_WORLD_SIZE"), env.number("OMPI_COMM_WORLD_RANK")
    local = env.number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
    local_processes = env.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    where = env.coordinator()
    if where is None and local_processes == processes:
        where = CoordinatorAddress("127.0.0.1", PORT)
    if where is None:
        uri = env.get("OMPI_MCA_orte_hnp_uri")
        host = _first_node(env) if uri else ""
        where = CoordinatorAddress(host, job_port(uri.partition(".")[0], 1 << 12)) if host else None
    if where is None:
        raise _no_address("Open MPI", processes, env, "mpirun -x JTRAIN_COORDINATOR ...")
    return Cluster(
        kind="Open MPI",
        processes=processes,
        index=index,
        coordinator=where,
        devices=env.local_gpus(local, local_processes),
        by=env.used,
    )


def _first_node(env: ClusterVariables) -> str:
    """Return the node of process 0 by Open MPI 4: `mpirun`'s own, if it has processes.

    The nodes are in the order of the daemons, `mpirun` first: `head,n[1:1-2]@0(3)`. The variable is
    not set for processes beside `mpirun`. Recorded from Open MPI 4.1.4.
    """
    nodes = _expand_nodes(env.get("OMPI_MCA_orte_node_regex"))
    if nodes and env.number("OMPI_MCA_orte_num_nodes", len(nodes)) < len(nodes):
        return nodes[1]
    found = _HNP.search(env.get("OMPI_MCA_orte_hnp_uri"))
    return (found[1] or found[2]) if found else ""


def _expand_nodes(text: str) -> list[str]:
    """Expand Open MPI's list of nodes: `head,n[2:8-10]@0(4)` -> head, n08, n09, n10."""
    slurm = re.sub(r"\[(\d+):([\d,-]+)\]", _pad, text.partition("@")[0])
    return parse_hosts(slurm, "OMPI_MCA_orte_node_regex") if slurm else []


def _pad(found: re.Match[str]) -> str:
    """Return one bracket with its numbers padded to their width, as in a list of Slurm."""
    return "[" + re.sub(r"\d+", lambda number: number[0].zfill(int(found[1])), found[2]) + "]"


def read_mpich(env: ClusterVariables) -> Cluster:
    """Read the processes that MPICH's or Intel MPI's `mpiexec` (Hydra) started."""
    processes, local_processes = env.number("PMI_SIZE"), env.number("MPI_LOCALNRANKS")
    where = env.coordinator()
    if where is None and local_processes != processes:
        raise _no_address("MPICH", processes, env, "mpiexec -genv JTRAIN_COORDINATOR HOST:8476 ...")
    return Cluster(
        kind="MPICH",
        processes=processes,
        index=env.number("PMI_RANK"),
        coordinator=where or CoordinatorAddress("127.0.0.1", PORT),
        devices=env.local_gpus(env.number("MPI_LOCALRANKID", 0), local_processes),
        by=env.used,
    )


def read_pmi(env: ClusterVariables) -> Cluster:
    """Read the processes of another launcher that speaks PMI, such as Cray's PALS."""
    processes = env.number("PMI_SIZE")
    local = env.number("PMI_LOCAL_RANK", 0)
    local_processes = env.number("PMI_LOCAL_SIZE", 1)
    where = env.coordinator()
    if where is None and local_processes != processes:
        raise _no_address("PMI", processes, env, "mpiexec --env JTRAIN_COORDINATOR=HOST:8476 ...")
    return Cluster(
        kind="PMI",
        processes=processes,
        index=env.number("PMI_RANK"),
        coordinator=where or CoordinatorAddress("127.0.0.1", PORT),
        devices=env.local_gpus(local, local_processes),
        by=env.used,
    )


def read_pmix(env: ClusterVariables) -> Cluster:
    """Read the processes of PRRTE's `prterun`: PMIx numbers them and does not say how many."""
    index, where = env.number("PMIX_RANK"), env.coordinator()
    if where is None or not env.get("JTRAIN_PROCESSES"):
        raise ConfigError(
            f"PMIx started this process as number {index} ({env.described}), and does not say "
            f"how many there are nor where the first is. Set both: prterun "
            f"-x JTRAIN_PROCESSES=4 -x JTRAIN_COORDINATOR=HOST:{PORT} ...; or set "
            f"JTRAIN_PROCESSES=1 if each trains by itself."
        )
    return Cluster(
        kind="PMIx",
        processes=env.number("JTRAIN_PROCESSES"),
        index=index,
        coordinator=where,
        by=env.used,
    )


def read_jsrun(env: ClusterVariables) -> Cluster:
    """Read the tasks that LSF's `jsrun` started.

    The first host of the job is its launch node, which has no tasks. Source: LSFEnvironment of
    https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lsf.html.
    """
    processes = env.number("JSM_NAMESPACE_SIZE")
    hosts = env.get("LSB_MCPU_HOSTS").split()[::2]  # each is followed by its number of slots
    where = env.coordinator()
    if where is None and hosts:
        where = CoordinatorAddress(hosts[min(1, len(hosts) - 1)], job_port(env.get("LSB_JOBID")))
    if where is None:
        raise _no_address("jsrun", processes, env, "jsrun -E JTRAIN_COORDINATOR=HOST:8476 ...")
    local_processes = env.number("JSM_NAMESPACE_LOCAL_SIZE", 1)
    return Cluster(
        kind="LSF jsrun",
        processes=processes,
        index=env.number("JSM_NAMESPACE_RANK"),
        coordinator=where,
        devices=env.local_gpus(env.number("JSM_NAMESPACE_LOCAL_RANK", 0), local_processes),
        by=env.used,
    )


def _no_address(launcher: str, processes: int, env: ClusterVariables, how: str) -> ConfigError:
    return ConfigError(
        f"{launcher} started {processes} processes on several machines and does not say where the "
        f"first is ({', '.join(env.used)}). Set JTRAIN_COORDINATOR=HOST:{PORT} for all of them, "
        f"with the machine of process 0: {how}"
    )
