"""JobSet: a manifest of Kubernetes, https://jobset.sigs.k8s.io, v0.12."""

from typing import Any

from jtrain.distributed.manifests.cluster_job import (
    EXIT_USER_ERROR,
    NODE_POOL,
    WORKERS,
    ClusterJob,
    check_kubernetes,
    failure_policy,
    needs_node_pool,
    pod_failure_policy,
    pod_spec,
    queue_label,
    resource_limits,
)

_CONTAINER = "jtrain"
_MAX_INT32 = 2**31 - 1  # pods of a job that may fail, where they are restarted in place


def job_set(job: ClusterJob) -> dict[str, Any]:
    """Return the JobSet of a job: a job for each slice, a pod for each host.

    Raises:
        ConfigError: if Kubernetes would not accept it.
    """
    check_kubernetes(job, WORKERS)
    machines = job.machines
    metadata: dict[str, Any] = {"name": job.name}
    if job.queue:
        metadata["labels"] = queue_label(job)
    if needs_node_pool(machines):
        metadata["annotations"] = NODE_POOL
    policy = failure_policy(job)
    template: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": machines.hosts,
        "completions": machines.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(_CONTAINER),
        "template": {"spec": pod_spec(job, _container(job))},
    }
    if job.agent:
        policy = {"restartStrategy": "InPlaceRestart", **policy}
        _restart_in_place(job, template)
    workers = {"name": WORKERS, "replicas": machines.groups, "template": {"spec": template}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"failurePolicy": policy, "replicatedJobs": [workers]},
    }


def _container(job: ClusterJob) -> dict[str, Any]:
    return {
        "name": _CONTAINER,
        "image": job.image,
        "workingDir": job.volume,
        "command": list(job.command),
        "env": _environment(job),
        "resources": {"limits": resource_limits(job.machines)},
    }


def _environment(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the variables by which `detect` finds the cluster and the index of a pod."""
    machines = job.machines
    env = [
        _annotation("JOBSET_NAME", "jobset-name"),
        _annotation("REPLICATED_JOB_NAME", "replicatedjob-name"),
        {"name": "PODS_PER_JOB", "value": str(machines.hosts)},
    ]
    if machines.groups > 1:
        env += [
            {"name": "JOBS", "value": str(machines.groups)},
            _annotation("JOB_INDEX", "job-index"),
        ]
    return env


def _annotation(variable: str, name: str) -> dict[str, Any]:
    path = f"metadata.annotations['jobset.sigs.k8s.io/{name}']"
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _restart_in_place(job: ClusterJob, template: dict[str, Any]) -> None:
    """Let JobSet's agent restart the containers of all pods, which stay on their nodes.

    An alpha feature of JobSet 0.12 (its gate InPlaceRestart) and of Kubernetes 1.35 (the action
    RestartAllContainers). Source: https://github.com/kubernetes-sigs/jobset/tree/v0.12.0/keps/467-InPlaceRestart.
    """
    template |= {"backoffLimit": _MAX_INT32, "podReplacementPolicy": "Failed"}
    pod = template["template"]["spec"]
    pod["serviceAccountName"] = "jobset-in-place-restart"
    pod["containers"][0] |= {
        "restartPolicy": "Never",
        "restartPolicyRules": [_restart_unless(0, EXIT_USER_ERROR)],
    }
    pod["initContainers"] = [
        {
            "name": "in-place-restart-agent",
            "image": job.agent,
            "restartPolicy": "Always",  # a sidecar
            "restartPolicyRules": [_restart_unless(0)],
            "env": [
                _annotation("JOBSET_NAME", "jobset-name"),
                {
                    "name": "POD_NAME",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                },
            ],
            # The worker starts once the agents of all pods are up: ten minutes at most.
            "startupProbe": {
                "httpGet": {"path": "/barrier-is-down", "port": 8081},
                "failureThreshold": 600,
                "periodSeconds": 1,
            },
        }
    ]


def _restart_unless(*codes: int) -> dict[str, Any]:
    exit_codes = {"operator": "NotIn", "values": list(codes)}
    return {"action": "RestartAllContainers", "exitCodes": exit_codes}
