"""Nodes of a step of Slurm, in the order of its tasks."""

from typing import NamedTuple

from jtrain.distributed.cluster.hostlist import parse_hosts, parse_tasks
from jtrain.distributed.cluster.variables import ClusterVariables


class SlurmNodes(NamedTuple):
    """The nodes of a step, and the number of its tasks on each."""

    hosts: list[str]
    tasks: list[int]
    misplaced: str
    """Why the first host is not that of task 0, as far as this task knows; empty: it is."""


def read_nodes(env: ClusterVariables, processes: int) -> SlurmNodes:
    """Read the nodes of the step.

    Slurm sorts SLURM_STEP_NODELIST by name. Tasks are in another order if the step has several
    components, or under `--distribution=arbitrary`. For components of a job the lists of the
    components tell the order; for those of a step only the task's own node does, to itself.
    """
    hosts = parse_hosts(env.text("SLURM_STEP_NODELIST"))
    spelt = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    tasks = parse_tasks(spelt)
    node, name, index = env.number("SLURM_NODEID", 0), env.get("SLURMD_NODENAME"), "SLURM_PROCID"
    if size := env.number("SLURM_HET_SIZE", 0):
        groups = [_read_component(env, group) for group in range(size)]
        if sum(sum(counts) for _, counts in groups) == processes:  # the step has them all
            hosts = [host for names, _ in groups for host in names]
            tasks = [count for _, counts in groups for count in counts]
    here = hosts[node] if node < len(hosts) else ""
    if name and (here != name or (env.number(index) == 0 and hosts[0] != name)):
        misplaced = f"task {env.number(index)} is on {name}, which is not node {node} of the list"
        if here == name:
            misplaced = f"task 0 is on {name}, and the list begins with {hosts[0]}"
        return SlurmNodes(hosts, tasks, misplaced)
    return SlurmNodes(hosts, tasks, "")


def _read_component(env: ClusterVariables, group: int) -> tuple[list[str], list[int]]:
    names, counts = (
        f"SLURM_JOB_NODELIST_HET_GROUP_{group}",
        f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}",
    )
    return parse_hosts(env.text(names), names), parse_tasks(env.text(counts), counts)
