"""Step of a Slurm job, whose tasks `srun` starts."""

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress, job_port
from jtrain.distributed.cluster.hostlist import parse_hosts, parse_tasks
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError


def read_slurm(env: ClusterVariables) -> Cluster:
    """Read a step of a Slurm job, which `srun` starts; the hosts are in the order of the tasks."""
    processes = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
    nodes = parse_hosts(env.text("SLURM_STEP_NODELIST"))
    several_parts = env.number("SLURM_HET_SIZE", 1) > 1
    if several_parts:
        local_processes = len(env.get("SLURM_GTIDS", "0").split(","))
    else:
        spelt = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
        on_node, node = parse_tasks(spelt), env.number("SLURM_NODEID", 0)
        local_processes = on_node[node] if node < len(on_node) else 1
    first = _first_of_parts(env, nodes) if several_parts else nodes[0]
    bound = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_NTASKS_PER_GPU")
    return Cluster(
        kind="Slurm",
        processes=processes,
        index=env.number("SLURM_PROCID"),
        coordinator=CoordinatorAddress(first, job_port(env.text("SLURM_JOB_ID"))),
        devices=() if bound else env.local_gpus(env.number("SLURM_LOCALID", 0), local_processes),
        by=env.used,
    )


def _first_of_parts(env: ClusterVariables, nodes: list[str]) -> str:
    """Return the node of task 0 in a step of a heterogeneous job.

    Its nodes are sorted by name, and its tasks are counted by component: the first node of the
    first component that the step has. Source: _reorder_het_job_recs in src/srun/srun.c and
    exec_task in src/slurmd/slurmstepd/task.c of SchedMD/slurm.
    """
    if where := env.coordinator():
        return where.host
    for part in range(env.number("SLURM_HET_SIZE")):
        name = f"SLURM_JOB_NODELIST_HET_GROUP_{part}"
        hosts = parse_hosts(env.get(name), name) if env.get(name) else []
        for host in hosts:
            if host in nodes:
                return host
    if len(nodes) == 1:
        return nodes[0]
    raise ConfigError(
        f"Slurm started this step over several components of a heterogeneous job, and does not say "
        f"on which node task 0 is ({env.described}). Set JTRAIN_COORDINATOR=HOST:{PORT} for all "
        f"tasks, with the node of task 0: srun --export=ALL,JTRAIN_COORDINATOR=HOST:{PORT} ..."
    )
