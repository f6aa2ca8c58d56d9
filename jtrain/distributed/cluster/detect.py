"""Detection of the cluster from the environment."""

import dataclasses
from collections.abc import Mapping

from jtrain.distributed.cluster.cluster import Cluster
from jtrain.distributed.cluster.kinds import KINDS
from jtrain.distributed.cluster.variables import ClusterVariables


def detect(environ: Mapping[str, str]) -> Cluster:
    """Return the cluster that the environment variables define; one process if they define none.

    Raises:
        ConfigError: if variables are incomplete, malformed or contradictory.
    """
    found = [kind for kind in KINDS if any(environ.get(mark) for mark in kind.marks)]
    if not found:
        return Cluster(note=_not_a_step(environ))
    kind, *outer = found
    cluster = kind.read(ClusterVariables(environ, kind.name))
    if not outer:
        return cluster
    names = " and ".join(other.name for other in outer)
    return dataclasses.replace(cluster, note=f"{names} is set too; {kind.name} takes precedence")


def _not_a_step(environ: Mapping[str, str]) -> str:
    """Return a note about a Slurm job whose processes srun did not start."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" not in environ or tasks == "1":
        return ""
    return f"a Slurm job of {tasks} tasks, and srun did not start this process: type srun before it"
