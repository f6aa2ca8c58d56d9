"""Pods that train together: a JobSet, an indexed Job, a JAXJob of Kubeflow."""

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError


def read_job_set(env: ClusterVariables) -> Cluster:
    """Read one replicated job of a JobSet; the names of its pods are known beforehand."""
    name, job = env.text("JOBSET_NAME"), env.text("REPLICATED_JOB_NAME")
    pods, jobs = env.number("PODS_PER_JOB"), env.number("JOBS", 1)
    index = env.number("JOB_INDEX", 0) * pods + env.number("JOB_COMPLETION_INDEX")
    return Cluster(
        kind="Kubernetes JobSet",
        processes=pods * jobs,
        index=index,
        coordinator=CoordinatorAddress(f"{name}-{job}-0-0.{name}", PORT),
        by=env.used,
    )


def read_job(env: ClusterVariables) -> Cluster:
    """Read the pods of an indexed Job; Kubernetes tells a pod its number and no more.

    The host name of a pod is that of the Job and its number. Source:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
    """
    index, where = env.number("JOB_COMPLETION_INDEX"), env.coordinator()
    if where is None or not env.get("JTRAIN_PROCESSES"):
        job, _, number = env.get("HOSTNAME").rpartition("-")
        first = f"{job}-0" if job and number == f"{index}" else "JOB-0"
        raise ConfigError(
            f"a Kubernetes Job started this pod as number {index} ({env.described}), and does not "
            f"say how many pods there are nor where the first is. Set both in the template of the "
            f"pods: JTRAIN_PROCESSES to the Job's completions, and "
            f"JTRAIN_COORDINATOR={first}.SERVICE:{PORT}, with the headless Service that the "
            f"template names as subdomain; or set JTRAIN_PROCESSES=1 if each pod trains by itself. "
            f"For a JobSet: docs/clusters/jobset.md."
        )
    return Cluster(
        kind="Kubernetes Job",
        processes=env.number("JTRAIN_PROCESSES"),
        index=index,
        coordinator=where,
        by=env.used,
    )


def read_jax_job(env: ClusterVariables) -> Cluster:
    """Read a JAXJob of Kubeflow's training operator, the predecessor of Kubeflow Trainer.

    Source: pkg/controller.v1/jax/envvar.go of kubeflow/training-operator.
    """
    return Cluster(
        kind="Kubeflow JAXJob",
        processes=env.number("NUM_PROCESSES"),
        index=env.number("PROCESS_ID"),
        coordinator=CoordinatorAddress(
            env.text("COORDINATOR_ADDRESS"), env.number("COORDINATOR_PORT")
        ),
        by=env.used,
    )
