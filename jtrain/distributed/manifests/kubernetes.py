"""Manifests of Kubernetes: JobSet, https://jobset.sigs.k8s.io, v0.12, and TrainJob of Kubeflow."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jtrain.distributed.manifests.machines import Machines
from jtrain.errors import ConfigError

WORKERS, NODE = "workers", "node"  # replicated job of a JobSet of ours, and of Kubeflow Trainer
EXIT_USER_ERROR = 2  # a command that fails again; docs/processes.md has the table
# JobSet places each job in a node pool of its own.
NODE_POOL = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 63  # characters of a DNS label, RFC 1035
_SUFFIX = 6  # `-abcde`, which Kubernetes appends to the name of a pod


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A command that one process runs on each host."""

    name: str
    machines: Machines
    command: tuple[str, ...]
    """The words, `jtrain` first."""
    image: str = ""
    restarts: int = 10
    claim: str = ""
    """Persistent volume claim, volume of SkyPilot, or HOST:/PATH of NFS, that all hosts mount."""
    volume: str = "/shared"
    """Path at which it is mounted; the command runs there."""
    store: str = ""
    """Address to which the run copies its checkpoints (`checkpoint.store`)."""
    queue: str = ""
    """Local queue of Kueue."""
    select: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels that a node must have."""
    agent: str = ""
    """Image of JobSet's agent, which restarts pods in place; empty: pods are made anew."""
    spot: bool = False
    """Machines that may be taken away at any time, for less money; SkyPilot's."""
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL."""


def check_kubernetes(job: ClusterJob, workers: str) -> None:
    """Raise unless Kubernetes accepts the job.

    Args:
        workers: name of the replicated job.

    Raises:
        ConfigError: for a name that is no DNS label or makes those of pods too long, or without
            an image or a volume.
    """
    if not _LABEL.fullmatch(job.name):
        raise ConfigError(
            f"--name {job.name}: Kubernetes takes lower-case letters, digits and -, a letter "
            f"first. Write --name {to_label(job.name) or 'train'}."
        )
    machines = job.machines
    pod = f"{job.name}-{workers}-{machines.groups - 1}-{machines.hosts - 1}"
    if (excess := len(pod) + _SUFFIX - _LONGEST) > 0:
        most = len(job.name) - excess
        raise ConfigError(
            f"--name {job.name}: the names of its pods, such as {pod}-abcde, have {excess} "
            f"characters more than the {_LONGEST} that Kubernetes takes. Write a name of at most "
            f"{most}: --name {job.name[:most].rstrip('-')}."
        )
    if not job.image:
        raise ConfigError(
            f"the image is missing: an image with jtrain, JAX for {machines.topology.kind} and "
            f"your experiment. Write --image REGISTRY/NAME:TAG."
        )
    if not job.claim:
        raise ConfigError(
            "a pod loses its files when it ends, and a run resumes from runs/, which all pods "
            "share. Write --claim NAME, a PersistentVolumeClaim of accessMode ReadWriteMany "
            "(ReadWriteOnce suffices for one pod)."
        )
    if not job.volume.startswith("/"):
        raise ConfigError(
            f"--volume {job.volume}: the path at which the claim is mounted begins with /, such "
            f"as --volume /shared."
        )


def to_label(name: str) -> str:
    """Return a name in the characters of a DNS label: `llama2_7b` -> `llama2-7b`."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return label.lstrip("-0123456789")[:40].rstrip("-")


def pod_spec(job: ClusterJob, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod: its nodes, its volumes and one container.

    Args:
        container: fields of the container beside its volumes; `name` at least.
    """
    machines, selector = job.machines, dict(job.select)
    mounts = [{"name": "shared", "mountPath": job.volume}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}}
    ]
    if machines.tpu:
        selector = {
            "cloud.google.com/gke-tpu-accelerator": machines.tpu.label,
            "cloud.google.com/gke-tpu-topology": machines.topology.shape,
            **selector,
        }
    else:  # NCCL's shared memory; a container has 64 MB of it otherwise
        mounts.append({"name": "memory", "mountPath": "/dev/shm"})
        volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
    }
    if machines.groups > 1:  # the slices talk over the network of the hosts
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if selector:
        spec["nodeSelector"] = selector
    spec["containers"] = [{**container, "volumeMounts": mounts}]
    spec["volumes"] = volumes
    return spec


def needs_node_pool(machines: Machines) -> bool:
    """Return whether a job takes a whole node pool: on GKE, a slice of several hosts is one."""
    return machines.tpu is not None and machines.hosts > 1


def queue_label(job: ClusterJob) -> dict[str, str]:
    """Return the label by which Kueue queues a job."""
    return {"kueue.x-k8s.io/queue-name": job.queue}


def resource_limits(machines: Machines) -> dict[str, int]:
    """Return the accelerators of a pod: `google.com/tpu: 4`."""
    return {"google.com/tpu" if machines.tpu else "nvidia.com/gpu": machines.chips}


def failure_policy(job: ClusterJob) -> dict[str, Any]:
    """Return the policy of a JobSet: restart, but not after an error in the command."""
    return {
        "maxRestarts": job.restarts,
        "rules": [
            {
                "name": "errorInTheCommand",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }


def pod_failure_policy(container: str) -> dict[str, Any]:
    """Return the policy of a Job: an error in the command fails it with a reason of its own."""
    codes = {"containerName": container, "operator": "In", "values": [EXIT_USER_ERROR]}
    return {"rules": [{"action": "FailJob", "onExitCodes": codes}]}


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
