"""Processes that Slurm or an MPI launcher started: Open MPI, MPICH, jsrun, any of PMI or PMIx.

None of them needs an MPI library here: their variables number the processes. Most of them do not
say where process 0 is; then JTRAIN_COORDINATOR does, which they hand to all processes (`-x` of Open
MPI, `-genv` of MPICH).
"""

import itertools
import re
from collections.abc import Callable

from jtrain.distributed.cluster.cluster import (
    LOOPBACK,
    PORT,
    Cluster,
    ClusterVariables,
    CoordinatorAddress,
    describe_variables,
)
from jtrain.errors import ConfigError

_PIECE = r"(?:[^,\[\]]++|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])"  # of a host's name, or numbers
_HNP = re.compile(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)")


def job_port(job: str, unit: int = 1, step: str = "") -> int:
    """Return a port for a job, above the ephemeral ports: two jobs on a node rarely share one.

    Args:
        job: number of the job; all jobs share one port where it is no number.
        unit: difference between the numbers of two jobs.
        step: number of a step of the job, of which several may run at the same time; 257 keeps them
            off the ports of the next jobs.
    """
    number = int(job) // unit if job.isdigit() else 0
    return 61440 + (number + 257 * (int(step) if step.isdigit() else 0)) % 4096


def parse_hosts(text: str, variable: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Expand a list of hosts: `node[01-03,07],login` -> node01, node02, node03, node07, login.

    Raises:
        ConfigError: if the text is not a list of hosts.

    Source: https://slurm.schedmd.com/scontrol.html#OPT_hostnames.
    """
    if not re.fullmatch(f"{_PIECE}+(?:,{_PIECE}+)*", text):
        raise ConfigError(
            f"{variable} should be a list of hosts, such as node[01-04,07], and is {text!r}. Set "
            f"JTRAIN_COORDINATOR, JTRAIN_PROCESSES and JTRAIN_PROCESS instead."
        )
    hosts = []
    for part in re.findall(f"{_PIECE}+", text):
        hosts += map("".join, itertools.product(*map(_expand, re.findall(_PIECE, part))))
    return hosts


def _expand(piece: str) -> list[str]:
    """Return the numbers of a bracket, each as wide as the lowest; or the piece itself."""
    if not piece.startswith("["):
        return [piece]
    ranges = re.findall(r"(\d+)(?:-(\d+))?", piece)
    return [f"{n:0{len(a)}}" for a, b in ranges for n in range(int(a), int(b or a) + 1)]


def parse_tasks(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand tasks per node: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        ConfigError: if the text is not a list of counts.
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"{variable} should be tasks per node, such as 2(x4),1, and is {text!r}. Unset it to "
            f"use all devices of the machine in each process."
        )
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def read_slurm(env: ClusterVariables) -> Cluster:
    """Read a step of a Slurm job, which `srun` starts.

    Slurm sorts SLURM_STEP_NODELIST by name. Tasks are in another order if the step has several
    components, or under `--distribution=arbitrary`; only the task's own node tells so, to itself.
    """
    processes = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
    hosts, node = parse_hosts(env.text("SLURM_STEP_NODELIST")), env.number("SLURM_NODEID", 0)
    tasks = parse_tasks(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    )
    port = job_port(env.text("SLURM_JOB_ID"), step=env.get("SLURM_STEP_ID"))
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
    return Cluster(
        processes=processes,
        index=index,
        coordinator=CoordinatorAddress(hosts[0], port),
        devices=() if bound else env.local_gpus(env.number("SLURM_LOCALID", 0), local_processes),
    )


Reader = Callable[[ClusterVariables], Cluster]


def read_ranks(
    names: str,
    how: str,
    find: Callable[[ClusterVariables], CoordinatorAddress | None] = lambda env: None,
) -> Reader:
    """Return a reader of processes that four variables number.

    Args:
        names: the number of all processes and of this one, and those of its machine.
        how: what to type where nothing says where process 0 is.
        find: returns its address, where other variables give it.
    """
    size, rank, local_size, local_rank = names.split()

    def read(env: ClusterVariables) -> Cluster:
        processes, local_processes = env.number(size), env.number(local_size, 1)
        on_this_machine = local_processes == processes
        where = env.coordinator()
        where = where or (CoordinatorAddress(LOOPBACK, PORT) if on_this_machine else find(env))
        if where is None:
            raise ConfigError(
                f"{env.kind} started {processes} processes on several machines and does not say "
                f"where the first is ({', '.join(env.used)}). Set JTRAIN_COORDINATOR=HOST:{PORT} "
                f"for all of them, with the machine of process 0: {how}"
            )
        index, local = env.number(rank), env.number(local_rank, 0)
        devices = env.local_gpus(local, local_processes)
        return Cluster(processes=processes, index=index, coordinator=where, devices=devices)

    return read


def find_lsf_node(env: ClusterVariables) -> CoordinatorAddress | None:
    """Return the address of process 0 by LSF.

    The first host of the job is its launch node, which has no tasks. Source: LSFEnvironment of
    https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lsf.html.
    """
    hosts = env.get("LSB_MCPU_HOSTS").split()[::2]  # each is followed by its number of slots
    port = job_port(env.get("LSB_JOBID"))
    return CoordinatorAddress(hosts[min(1, len(hosts) - 1)], port) if hosts else None


def find_open_mpi_node(env: ClusterVariables) -> CoordinatorAddress | None:
    """Return the address of process 0 by Open MPI 4: on `mpirun`'s own node, if it has processes.

    The nodes are in the order of the daemons, `mpirun` first: `head,n[1:1-2]@0(3)`, where the
    number before the colon is a width. The variable is not set for processes beside `mpirun`.
    Recorded from Open MPI 4.1.4; version 5 gives neither variable.
    """
    variable = "OMPI_MCA_orte_node_regex"
    uri, text = env.get("OMPI_MCA_orte_hnp_uri"), env.get(variable).partition("@")[0]
    nodes = parse_hosts(re.sub(r"\[(\d+):([\d,-]+)\]", _pad, text), variable) if text else []
    if uri and nodes and env.number("OMPI_MCA_orte_num_nodes", len(nodes)) < len(nodes):
        host = nodes[1]
    else:
        found = _HNP.search(uri)
        host = (found[1] or found[2]) if found else ""
    return CoordinatorAddress(host, job_port(uri.partition(".")[0], 1 << 12)) if host else None


def _pad(found: re.Match[str]) -> str:
    """Return one bracket with its numbers padded to their width, as in a list of Slurm."""
    return "[" + re.sub(r"\d+", lambda number: number[0].zfill(int(found[1])), found[2]) + "]"


def read_numbered(env: ClusterVariables, variable: str, started: str, advice: str) -> Cluster:
    """Read a process whose launcher gives its number and no more.

    Args:
        variable: has the number.
        started: who started it, for the message.
        advice: how to set JTRAIN_PROCESSES and JTRAIN_COORDINATOR, which say the rest.
    """
    index, where = env.number(variable), env.coordinator()
    if where is None or not env.get("JTRAIN_PROCESSES"):
        raise ConfigError(
            f"{started} as number {index} ({describe_variables(env.used)}), and does not say how "
            f"many there are nor where the first is. Set both: {advice}; or set JTRAIN_PROCESSES=1 "
            f"if each trains by itself."
        )
    return Cluster(processes=env.number("JTRAIN_PROCESSES"), index=index, coordinator=where)


def read_pmix(env: ClusterVariables) -> Cluster:
    """Read the processes of PRRTE's `prterun`: PMIx numbers them and does not say how many."""
    advice = f"prterun -x JTRAIN_PROCESSES=4 -x JTRAIN_COORDINATOR=HOST:{PORT} ..."
    return read_numbered(env, "PMIX_RANK", "PMIx started this process", advice)


def read_job(env: ClusterVariables) -> Cluster:
    """Read the pods of an indexed Job; Kubernetes tells a pod its number and no more.

    The host name of a pod is that of the Job and its number. Source:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    variable = "JOB_COMPLETION_INDEX"
    job, _, number = env.get("HOSTNAME").rpartition("-")
    first = f"{job}-0" if job and number == env.get(variable) else "JOB-0"
    advice = (
        f"in the template of the pods, JTRAIN_PROCESSES to the Job's completions, and "
        f"JTRAIN_COORDINATOR={first}.SERVICE:{PORT}, with the headless Service that the template "
        f"names as subdomain (for a JobSet: docs/clusters.md)"
    )
    return read_numbered(env, variable, "a Kubernetes Job started this pod", advice)
