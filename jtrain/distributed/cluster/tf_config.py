"""TF_CONFIG, the variable by which TensorFlow's processes know one another."""

import json
from typing import Any

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json

TASKS = ("chief", "worker", "evaluator")
_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


def tf_config(said: ClusterVariables) -> Cluster:
    """The chief is process 0 and the workers follow; without a chief the first worker is it.

    An evaluator is a process of its own.

    Raises:
        ConfigError: if it is no JSON, or names no such cluster.

    Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.
    """
    text = said.text("TF_CONFIG")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"TF_CONFIG is no JSON: {error}. It begins {text[:40]!r}. Set {_EXAMPLE}; or unset it "
            f"to run in one process."
        ) from None
    cluster, task = _part(found, "cluster", text), _part(found, "task", text)
    if strange := [name for name in cluster if name not in TASKS]:
        raise ConfigError(
            f"TF_CONFIG names tasks of type {', '.join(strange)}, and here are {', '.join(TASKS)}: "
            f"parameter servers are not started this way. Leave them out of it."
        )
    kind, index = task.get("type"), task.get("index", 0)
    there = cluster.get(kind, []) if isinstance(kind, str) else []
    if kind not in TASKS or not isinstance(index, int):
        raise _no_task(task, cluster)
    if kind == "evaluator":
        return Cluster(kind="TF_CONFIG", role="evaluates", by=said.seen)
    if not isinstance(there, list) or not 0 <= index < len(there):
        raise _no_task(task, cluster)
    trains = [*cluster.get("chief", []), *cluster.get("worker", [])]
    first = 0 if kind == "chief" else len(cluster.get("chief", []))
    return Cluster(
        kind="TF_CONFIG",
        processes=len(trains),
        index=first + index,
        coordinator=CoordinatorAddress.parse(str(trains[0]), "TF_CONFIG"),
        by=said.seen,
    )


def _part(found: Any, name: str, text: str) -> dict[str, Any]:
    part = found.get(name) if isinstance(found, dict) else None
    if not isinstance(part, dict):
        raise ConfigError(
            f"TF_CONFIG was to have an object {name!r} and has {text[:80]!r}. Set {_EXAMPLE}; or "
            f"unset it to run in one process."
        )
    return part


def _no_task(task: dict[str, Any], cluster: dict[str, Any]) -> ConfigError:
    counts = ", ".join(f"{len(hosts)} {name}" for name, hosts in cluster.items())
    return ConfigError(
        f"TF_CONFIG says that this is task {json.dumps(task)} of a cluster with "
        f"{counts or 'none'}, counted from 0. Set task.type and task.index to one that is there."
    )
