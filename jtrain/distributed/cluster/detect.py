"""Which cluster an environment speaks of."""

import dataclasses
from collections.abc import Mapping

from jtrain.distributed.cluster.cluster import Cluster
from jtrain.distributed.cluster.kinds import KINDS
from jtrain.distributed.cluster.variables import ClusterVariables


def detect(environ: Mapping[str, str]) -> Cluster:
    """The processes that train together, as the variables of the environment say; one if none do.

    Raises:
        ConfigError: for variables that are half set, no numbers or no JSON, or that contradict one
            another.
    """
    found = [kind for kind in KINDS if any(environ.get(mark) for mark in kind.marks)]
    if not found:
        return Cluster(note=_not_a_step(environ))
    kind, *around = found
    cluster = kind.read(ClusterVariables(environ, kind.name))
    if not around:
        return cluster
    names = " and ".join(other.name for other in around)
    return dataclasses.replace(cluster, note=f"{names} would be there too; {kind.name} is nearer")


def _not_a_step(environ: Mapping[str, str]) -> str:
    """What to say of a Slurm job whose processes srun did not start."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" not in environ or tasks == "1":
        return ""
    return f"a Slurm job of {tasks} tasks, and srun did not start this process: type srun before it"
