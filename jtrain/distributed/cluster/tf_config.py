"""TF_CONFIG, the variable that defines a cluster of TensorFlow processes."""

import json
from typing import Any

from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json

TASKS = ("chief", "ps", "worker", "evaluator")
_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


def read_tf_config(variables: ClusterVariables) -> Cluster:
    """Read TF_CONFIG: the chief is process 0, else the first worker; the workers follow.

    With parameter servers (`ps`) the chief coordinates, and the servers come before the workers. An
    evaluator is a cluster of its own.

    Raises:
        ConfigError: if the variable is not JSON, or does not define a cluster.

    Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.
    """
    text = variables.text("TF_CONFIG")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"TF_CONFIG is not JSON: {error}. It begins {text[:40]!r}. Set {_EXAMPLE}; or unset it "
            f"to run in one process."
        ) from None
    cluster, task = _section(found, "cluster", text), _section(found, "task", text)
    if unknown := [name for name in cluster if name not in TASKS]:
        raise ConfigError(
            f"TF_CONFIG has tasks of type {', '.join(unknown)}, and only {', '.join(TASKS)} are "
            f"supported. Leave these tasks out."
        )
    kind, index = task.get("type"), task.get("index", 0)
    addresses = cluster.get(kind, []) if isinstance(kind, str) else []
    if kind not in TASKS or not isinstance(index, int):
        raise _no_task(task, cluster)
    if kind == "evaluator":
        return Cluster(kind="TF_CONFIG", role="evaluates", by=variables.used)
    if not isinstance(addresses, list) or not 0 <= index < len(addresses):
        raise _no_task(task, cluster)
    servers = len(cluster.get("ps", []))
    if servers and len(cluster.get("chief", [])) != 1:
        raise ConfigError(
            "TF_CONFIG has tasks of type ps, and no task of type chief, which coordinates them. "
            "Set a chief in cluster, and start its process too."
        )
    trainers = [address for name in TASKS[:-1] for address in cluster.get(name, [])]
    for address in trainers:
        try:
            CoordinatorAddress.parse(str(address), "TF_CONFIG")
        except ConfigError:
            host = str(address).rpartition("//")[2].rstrip("/")
            host = f"[{host}]" if host.count(":") > 1 else host.partition(":")[0] or "HOST"
            raise ConfigError(
                f"TF_CONFIG has the address {address!r} in cluster, and an address is HOST:PORT. "
                f'Set "{host}:8476" there, with a port that is free on that machine.'
            ) from None
    first = sum(len(cluster.get(name, [])) for name in TASKS[: TASKS.index(kind)])
    return Cluster(
        kind="TF_CONFIG",
        processes=len(trainers),
        index=first + index,
        coordinator=CoordinatorAddress.parse(str(trainers[0]), "TF_CONFIG"),
        servers=servers,
        by=variables.used,
    )


def _section(found: Any, name: str, text: str) -> dict[str, Any]:
    section = found.get(name) if isinstance(found, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(
            f"TF_CONFIG should have an object {name!r} and has {text[:80]!r}. Set {_EXAMPLE}; or "
            f"unset it to run in one process."
        )
    return section


def _no_task(task: dict[str, Any], cluster: dict[str, Any]) -> ConfigError:
    counts = ", ".join(f"{len(hosts)} {name}" for name, hosts in cluster.items())
    return ConfigError(
        f"TF_CONFIG defines this process as task {json.dumps(task)} of a cluster with "
        f"{counts or 'none'}, counted from 0. Set task.type and task.index to an existing task."
    )
