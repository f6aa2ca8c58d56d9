"""Processes that Slurm or an MPI launcher started: Open MPI, MPICH, jsrun, any of PMI or PMIx.

None of them needs an MPI library here: their variables number the processes. Most of them do not
say where process 0 is; then JTRAIN_COORDINATOR does, which they hand to all processes (`-x` of Open
MPI, `-genv` of MPICH).
"""

import re
from collections.abc import Callable, Iterator, Sequence

from jtrain.distributed.cluster.cluster import (
    LOOPBACK,
    PORT,
    Cluster,
    ClusterVariables,
    CoordinatorAddress,
    job_port,
)
from jtrain.errors import ConfigError

_PARTS = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)(?:,|$)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def parse_hosts(text: str, variable: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Expand a list of hosts: `node[01-03,07],login` -> node01, node02, node03, node07, login.

    Raises:
        ConfigError: if the text is not a list of hosts.

    Source: https://slurm.schedmd.com/scontrol.html#OPT_hostnames.
    """
    parts = _PARTS.findall(text)
    if not parts or sum(len(part) + 1 for part in parts) - 1 != len(text):
        raise _error(text, variable)
    return [host for part in parts for host in _expand(part, text, variable)]


def parse_tasks(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand tasks per node: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        ConfigError: if the text is not a list of counts.
    """
    counts = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if not found:
            raise ConfigError(
                f"{variable} should be tasks per node, such as 2(x4),1, and is {text!r}. Unset it "
                f"to use all devices of the machine in each process."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _expand(part: str, text: str, variable: str) -> Iterator[str]:
    """Yield the hosts of one prefix, with all its brackets."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, closed, after = rest.partition("]")
    if not closed or not inside:
        raise _error(text, variable)
    for piece in inside.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or (high and not high.isdigit()) or int(high or low) < int(low):
            raise _error(text, variable)
        for number in range(int(low), int(high or low) + 1):
            for tail in _expand(after, text, variable) if after else [""]:
                yield f"{before}{number:0{len(low)}}{tail}"


def _error(text: str, variable: str) -> ConfigError:
    return ConfigError(
        f"{variable} should be a list of hosts, such as node[01-04,07], and is {text!r}. Set "
        f"JTRAIN_COORDINATOR, JTRAIN_PROCESSES and JTRAIN_PROCESS instead."
    )


def read_slurm(env: ClusterVariables) -> Cluster:
    """Read a step of a Slurm job, which `srun` starts.

    Slurm sorts SLURM_STEP_NODELIST by name. Tasks are in another order if the step has several
    components, or under `--distribution=arbitrary`; only the task's own node tells so, to itself.
    """
    processes = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
    hosts, node = parse_hosts(env.text("SLURM_STEP_NODELIST")), env.number("SLURM_NODEID", 0)
    spelt = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    tasks, port = (
        parse_tasks(spelt),
        job_port(env.text("SLURM_JOB_ID"), step=env.get("SLURM_STEP_ID")),
    )
    index, here = env.number("SLURM_PROCID"), env.get("SLURMD_NODENAME")
    listed = hosts[node] if node < len(hosts) else ""
    misplaced = here and (listed != here or (index == 0 and hosts[0] != here))
    if misplaced and processes > 1 and env.coordinator() is None:
        why = f"task {index} is on {here}, which is not node {node} of the list"
        if listed == here:
            why = f"task 0 is on {here}, and the list begins with {hosts[0]}"
        raise ConfigError(
            f"Slurm's list of the step's nodes is not in the order of its tasks: {why} "
            f"({', '.join(hosts)}). Set the node of task 0 for all tasks: "
            f"JTRAIN_COORDINATOR=NODE:{port} srun ..."
        )
    bound = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_NTASKS_PER_GPU")
    local_processes = tasks[node] if node < len(tasks) else 1
    devices = () if bound else env.local_gpus(env.number("SLURM_LOCALID", 0), local_processes)
    return env.cluster(processes, index, CoordinatorAddress(hosts[0], port), devices=devices)


_HNP = re.compile(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)")


def read_open_mpi(env: ClusterVariables) -> Cluster:
    """Read the processes that Open MPI's `mpirun` started.

    Version 4 gives the address of `mpirun` and the names of its nodes; version 5 gives neither.
    """
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    return _read_ranks(env, names, "mpirun -x JTRAIN_COORDINATOR ...", _first_node)


def read_mpich(env: ClusterVariables) -> Cluster:
    """Read the processes that MPICH's or Intel MPI's `mpiexec` (Hydra) started."""
    names = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
    return _read_ranks(env, names, "mpiexec -genv JTRAIN_COORDINATOR HOST:8476 ...")


def read_pmi(env: ClusterVariables) -> Cluster:
    """Read the processes of another launcher that speaks PMI, such as Cray's PALS."""
    names = [f"PMI_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    return _read_ranks(env, names, "mpiexec --env JTRAIN_COORDINATOR=HOST:8476 ...")


def read_jsrun(env: ClusterVariables) -> Cluster:
    """Read the tasks that LSF's `jsrun` started."""
    names = [f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    return _read_ranks(env, names, "jsrun -E JTRAIN_COORDINATOR=HOST:8476 ...", _launch_node)


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
    return env.cluster(env.number("JTRAIN_PROCESSES"), index, where)


def _read_ranks(
    env: ClusterVariables,
    names: Sequence[str],
    how: str,
    find: Callable[[ClusterVariables], CoordinatorAddress | None] = lambda env: None,
) -> Cluster:
    """Read processes that are numbered by four variables.

    Args:
        names: the number of all processes and of this one, and those of its machine.
        how: what to type where nothing says where process 0 is.
        find: returns its address, where other variables give it.
    """
    size, rank, local_size, local_rank = names
    processes, local_processes = env.number(size), env.number(local_size, 1)
    where = env.coordinator()
    if where is None and local_processes == processes:
        where = CoordinatorAddress(LOOPBACK, PORT)
    where = where or find(env)
    if where is None:
        raise ConfigError(
            f"{env.kind} started {processes} processes on several machines and does not say where "
            f"the first is ({', '.join(env.used)}). Set JTRAIN_COORDINATOR=HOST:{PORT} for all of "
            f"them, with the machine of process 0: {how}"
        )
    devices = env.local_gpus(env.number(local_rank, 0), local_processes)
    return env.cluster(processes, env.number(rank), where, devices=devices)


def _launch_node(env: ClusterVariables) -> CoordinatorAddress | None:
    """Return the address of process 0 by LSF.

    The first host of the job is its launch node, which has no tasks. Source: LSFEnvironment of
    https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lsf.html.
    """
    hosts = env.get("LSB_MCPU_HOSTS").split()[::2]  # each is followed by its number of slots
    port = job_port(env.get("LSB_JOBID"))
    return CoordinatorAddress(hosts[min(1, len(hosts) - 1)], port) if hosts else None


def _first_node(env: ClusterVariables) -> CoordinatorAddress | None:
    """Return the address of process 0 by Open MPI 4: on `mpirun`'s own node, if it has processes.

    The nodes are in the order of the daemons, `mpirun` first: `head,n[1:1-2]@0(3)`. The variable is
    not set for processes beside `mpirun`. Recorded from Open MPI 4.1.4.
    """
    uri = env.get("OMPI_MCA_orte_hnp_uri")
    nodes = _expand_nodes(env.get("OMPI_MCA_orte_node_regex")) if uri else []
    if nodes and env.number("OMPI_MCA_orte_num_nodes", len(nodes)) < len(nodes):
        host = nodes[1]
    else:
        found = _HNP.search(uri)
        host = (found[1] or found[2]) if found else ""
    return CoordinatorAddress(host, job_port(uri.partition(".")[0], 1 << 12)) if host else None


def _expand_nodes(text: str) -> list[str]:
    """Expand Open MPI's list of nodes: `head,n[2:8-10]@0(4)` -> head, n08, n09, n10."""
    slurm = re.sub(r"\[(\d+):([\d,-]+)\]", _pad, text.partition("@")[0])
    return parse_hosts(slurm, "OMPI_MCA_orte_node_regex") if slurm else []


def _pad(found: re.Match[str]) -> str:
    """Return one bracket with its numbers padded to their width, as in a list of Slurm."""
    return "[" + re.sub(r"\d+", lambda number: number[0].zfill(int(found[1])), found[2]) + "]"
