"""Step of a Slurm job, whose tasks `srun` starts."""

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress, job_port
from jtrain.distributed.cluster.slurm_nodes import read_nodes
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError


def read_slurm(env: ClusterVariables) -> Cluster:
    """Read a step of a Slurm job, which `srun` starts."""
    processes = env.number("SLURM_STEP_NUM_TASKS", env.number("SLURM_NTASKS", 1))
    nodes, node = read_nodes(env, processes), env.number("SLURM_NODEID", 0)
    local_processes = nodes.tasks[node] if node < len(nodes.tasks) else 1
    port = job_port(env.text("SLURM_JOB_ID"), step=env.get("SLURM_STEP_ID"))
    if nodes.misplaced and processes > 1 and env.coordinator() is None:
        raise ConfigError(
            f"Slurm's list of the step's nodes is not in the order of its tasks: "
            f"{nodes.misplaced} ({', '.join(nodes.hosts)}). Set the node of task 0 for all tasks: "
            f"JTRAIN_COORDINATOR=NODE:{port} srun ..."
        )
    bound = env.get("SLURM_GPUS_PER_TASK") or env.get("SLURM_NTASKS_PER_GPU")
    return Cluster(
        kind="Slurm",
        processes=processes,
        index=env.number("SLURM_PROCID"),
        coordinator=CoordinatorAddress(nodes.hosts[0], port),
        devices=() if bound else env.local_gpus(env.number("SLURM_LOCALID", 0), local_processes),
        by=env.used,
    )
