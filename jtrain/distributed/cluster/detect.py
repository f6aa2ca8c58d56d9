"""Detection of the cluster from the environment."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jtrain.distributed.cluster.cluster import Cluster
from jtrain.distributed.cluster.kinds import KINDS, ClusterKind
from jtrain.distributed.cluster.signs import find_sign
from jtrain.distributed.cluster.tpu import detect_tpu_vm
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError


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
    names = [n for n in (*kind.marks, *kind.counts, *kind.indexes) if environ.get(n)]
    seen = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names))
    raise ConfigError(
        f"{cluster.kind} is one process ({cluster.variables}), and {kind.name} started several "
        f"({seen}), so that each would train by itself. Unset {', '.join(cluster.by)} to train in "
        f"all of them, or set JTRAIN_PROCESSES=1 if each trains by itself."
    )
