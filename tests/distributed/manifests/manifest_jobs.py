"""Jobs that the tests of manifests share, and what a cluster makes of a manifest."""

from collections.abc import Iterator
from typing import Any

from jtrain.distributed.manifests import ClusterJob, find_machines, job_set, sky_task, train_job

BUILD = {"k8s": job_set, "trainjob": train_job, "skypilot": sky_task}
JOINS_SLICES = {"k8s"}
TOPOLOGIES = {"v5e:4x4": 4, "2*v6e:4x4": 8, "h100:8": 1, "2*h100:8": 2}  # and their hosts
CASES = [
    (engine, topology)
    for engine in BUILD
    for topology in TOPOLOGIES
    if engine in JOINS_SLICES or topology != "2*v6e:4x4"
]
COMMAND = ("jtrain", "run", "configs/gpt2.yaml", "data.path=data/web", "parallel.kind=fsdp")


def job(engine: str, topology: str, **changed: Any) -> ClusterJob:
    """Return a job that the engine takes."""
    sky = engine == "skypilot"
    given: dict[str, Any] = {
        "name": "gpt2",
        "image": "" if sky else "registry/jtrain:1",
        "claim": "10.0.0.2:/share" if sky else "shared",
    }
    machines = find_machines(topology)
    return ClusterJob(**{**given, "machines": machines, "command": COMMAND, **changed})


def documents(engine: str, made: ClusterJob) -> list[dict[str, Any]]:
    """Return the manifests of a job."""
    built = BUILD[engine](made)
    return built if isinstance(built, list) else [built]


def job_set_pods(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the environment of each pod, as Kubernetes and JobSet's annotations make it.

    Source: https://github.com/kubernetes-sigs/jobset/blob/v0.12.0/api/jobset/v1alpha2/jobset_types.go;
    https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/.
    """
    (workers,) = manifest["spec"]["replicatedJobs"]
    template = workers["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    for index in range(workers["replicas"]):
        annotations = {
            "jobset.sigs.k8s.io/jobset-name": manifest["metadata"]["name"],
            "jobset.sigs.k8s.io/replicatedjob-name": workers["name"],
            "jobset.sigs.k8s.io/job-index": str(index),
        }
        for pod in range(template["completions"]):
            env = {"JOB_COMPLETION_INDEX": str(pod)}
            for variable in container["env"]:
                env[variable["name"]] = variable.get("value") or _field(variable, annotations)
            yield env


def _field(variable: dict[str, Any], annotations: dict[str, str]) -> str:
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    name = path.removeprefix("metadata.annotations['").removesuffix("']")
    return annotations[name]


def train_job_pods(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the variables that Kubeflow Trainer sets.

    Source: https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/runtime/framework/plugins/jax/jax.go.
    """
    name, nodes = manifest["metadata"]["name"], manifest["spec"]["trainer"]["numNodes"]
    for node in range(nodes):
        yield {
            "JAX_NUM_PROCESSES": str(nodes),
            "JAX_PROCESS_ID": str(node),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
        }
