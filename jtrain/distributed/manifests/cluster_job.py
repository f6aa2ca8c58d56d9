"""Cluster job: a command on the machines of a topology, from which each manifest is made."""

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
