"""TrainJob: manifests of Kubeflow Trainer v2.3.

Source: https://www.kubeflow.org/docs/components/trainer.
"""

import dataclasses
from typing import Any

from jtrain.distributed.manifests.cluster_job import (
    NODE,
    NODE_POOL,
    ClusterJob,
    check_kubernetes,
    failure_policy,
    needs_node_pool,
    pod_failure_policy,
    pod_spec,
    queue_label,
    resource_limits,
)
from jtrain.errors import ConfigError

_API = "trainer.kubeflow.org/v1alpha1"


def train_job(job: ClusterJob) -> list[dict[str, Any]]:
    """Return a TrainingRuntime and the TrainJob that uses it.

    The runtime has the nodes, the volumes and the restarts, which a TrainJob cannot set.

    Raises:
        ConfigError: if Kubernetes would not accept them, and for several slices.
    """
    machines = job.machines
    if machines.groups > 1:
        raise ConfigError(
            f"--topology {machines.topology}: Kubeflow Trainer has one job of numNodes hosts, and "
            f"{machines.groups} slices are {machines.groups} jobs. Use --engine k8s, or one slice: "
            f"--topology {dataclasses.replace(machines.topology, count=1)}."
        )
    check_kubernetes(job, NODE)
    metadata: dict[str, Any] = {"name": job.name}
    if job.queue:
        metadata["labels"] = queue_label(job)
    trainer = {
        "numNodes": machines.hosts,
        "image": job.image,
        "command": list(job.command),
        "resourcesPerNode": {"limits": resource_limits(machines)},
    }
    return [
        _runtime(job),
        {
            "apiVersion": _API,
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {
                "runtimeRef": {"kind": "TrainingRuntime", "name": job.name},
                "trainer": trainer,
            },
        },
    ]


def _runtime(job: ClusterJob) -> dict[str, Any]:
    container = {"name": NODE, "image": job.image, "workingDir": job.volume}
    template = {
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(NODE),
        "template": {"spec": pod_spec(job, container)},
    }
    metadata: dict[str, Any] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    if needs_node_pool(job.machines):
        metadata["annotations"] = NODE_POOL
    node = {"name": NODE, "template": {"metadata": metadata, "spec": template}}
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": job.name,
            "labels": {"trainer.kubeflow.org/framework": "jax"},
        },
        "spec": {
            "mlPolicy": {"numNodes": job.machines.hosts, "jax": {}},
            "template": {"spec": {"failurePolicy": failure_policy(job), "replicatedJobs": [node]}},
        },
    }
