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
    spot: bool = False
    """Machines that may be taken away at any time, for less money; SkyPilot's."""
    grace: int = 30
    """Seconds between SIGTERM and SIGKILL."""


def check_kubernetes(job: ClusterJob) -> None:
    """Raise ConfigError unless the job has an image and a claim."""
    machines = job.machines
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


def to_label(name: str) -> str:
    """Return a name in the characters of a DNS label: `llama2_7b` -> `llama2-7b`."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return label.lstrip("-0123456789")[:40].rstrip("-")


def job_set(job: ClusterJob) -> dict[str, Any]:
    """Return the JobSet of a job: a job for each slice, a pod for each host.

    Raises:
        ConfigError: if Kubernetes would not accept it.
    """
    check_kubernetes(job)
    machines = job.machines
    container = {
        "name": "jtrain",
        "image": job.image,
        "workingDir": job.volume,
        "command": list(job.command),
        "env": _environment(machines),
        "resources": {"limits": _limits(machines)},
    }
    template = {
        "completionMode": "Indexed",
        "parallelism": machines.hosts,
        "completions": machines.hosts,
        **_job_template(job, container),
    }
    workers = {"name": WORKERS, "replicas": machines.groups, "template": {"spec": template}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **_queue(job), **_node_pool(machines)},
        "spec": {"failurePolicy": _failure_policy(job), "replicatedJobs": [workers]},
    }


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
    check_kubernetes(job)
    container = {"name": NODE, "image": job.image, "workingDir": job.volume}
    labels = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    node = {"metadata": labels | _node_pool(machines), "spec": _job_template(job, container)}
    jobs = {
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [{"name": NODE, "template": node}],
    }
    runtime = {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "jax"}},
        "spec": {
            "mlPolicy": {"numNodes": machines.hosts, "jax": {}},
            "template": {"spec": jobs},
        },
    }
    trainer = {
        "numNodes": machines.hosts,
        "image": job.image,
        "command": list(job.command),
        "resourcesPerNode": {"limits": _limits(machines)},
    }
    reference = {"kind": "TrainingRuntime", "name": job.name}
    train = {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": {"name": job.name, **_queue(job)},
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [runtime, train]


def _queue(job: ClusterJob) -> dict[str, Any]:
    return {"labels": {"kueue.x-k8s.io/queue-name": job.queue}} if job.queue else {}


def _node_pool(machines: Machines) -> dict[str, Any]:
    """Return the annotation for a slice of several hosts, which is a node pool on GKE."""
    return {"annotations": NODE_POOL} if machines.tpu and machines.hosts > 1 else {}


def _limits(machines: Machines) -> dict[str, int]:
    return {"google.com/tpu" if machines.tpu else "nvidia.com/gpu": machines.chips}


def _failure_policy(job: ClusterJob) -> dict[str, Any]:
    """Return the policy of a JobSet: restart, but not after an error in the command."""
    rule = {
        "name": "errorInTheCommand",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": job.restarts, "rules": [rule]}


def _job_template(job: ClusterJob, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a Job whose pods have one container.

    An error in the command fails it with a reason of its own.
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
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
    }
    if machines.groups > 1:  # the slices talk over the network of the hosts
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if selector:
        pod["nodeSelector"] = selector
    pod |= {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
    mistake = {
        "containerName": container["name"],
        "operator": "In",
        "values": [EXIT_USER_ERROR],
    }
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
        "template": {"spec": pod},
    }


def _environment(machines: Machines) -> list[dict[str, Any]]:
    """Return the variables by which `detect` finds the cluster and the index of a pod."""
    env = [
        _field("JOBSET_NAME", "jobset-name"),
        _field("REPLICATED_JOB_NAME", "replicatedjob-name"),
        {"name": "PODS_PER_JOB", "value": str(machines.hosts)},
    ]
    if machines.groups > 1:
        env += [
            {"name": "JOBS", "value": str(machines.groups)},
            _field("JOB_INDEX", "job-index"),
        ]
    return env


def _field(variable: str, annotation: str) -> dict[str, Any]:
    path = f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']"
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
