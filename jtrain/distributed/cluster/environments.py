"""Clusters of pods and cloud machines: Kubernetes, SkyPilot, AWS Batch, TF_CONFIG, slices of TPUs.

Their variables say it all, except on a TPU VM, whose metadata server is asked.
"""

import dataclasses
import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jtrain.distributed.accelerators import has_tpu_chips
from jtrain.distributed.cluster.cluster import PORT, Cluster, ClusterVariables, CoordinatorAddress
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json


def read_job_set(env: ClusterVariables) -> Cluster:
    """Read one replicated job of a JobSet; the names of its pods are known beforehand."""
    name, job = env.text("JOBSET_NAME"), env.text("REPLICATED_JOB_NAME")
    pods, jobs = env.number("PODS_PER_JOB"), env.number("JOBS", 1)
    index = env.number("JOB_INDEX", 0) * pods + env.number("JOB_COMPLETION_INDEX")
    where = CoordinatorAddress(f"{name}-{job}-0-0.{name}", PORT)
    return env.cluster(pods * jobs, index, where)


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
    return env.cluster(env.number("JTRAIN_PROCESSES"), index, where)


def read_jax_job(env: ClusterVariables) -> Cluster:
    """Read a JAXJob of Kubeflow's training operator, the predecessor of Kubeflow Trainer.

    Source: pkg/controller.v1/jax/envvar.go of kubeflow/training-operator.
    """
    where = CoordinatorAddress(env.text("COORDINATOR_ADDRESS"), env.number("COORDINATOR_PORT"))
    return env.cluster(env.number("NUM_PROCESSES"), env.number("PROCESS_ID"), where)


def read_sky_pilot(env: ClusterVariables) -> Cluster:
    """Read the nodes of a SkyPilot task, with one process per node."""
    hosts, nodes = env.text("SKYPILOT_NODE_IPS").split(), env.number("SKYPILOT_NUM_NODES")
    if len(hosts) != nodes:
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={nodes}, and SKYPILOT_NODE_IPS has {len(hosts)} addresses "
            f"({', '.join(hosts)}). Set both to the values of the task, or unset both to run in "
            f"one process."
        )
    where = CoordinatorAddress(hosts[0], PORT)
    return env.cluster(nodes, env.number("SKYPILOT_NODE_RANK"), where)


def read_aws_batch(env: ClusterVariables) -> Cluster:
    """Read a multi-node parallel job of AWS Batch: its main node is process 0.

    The main node alone has no address of the main node. Source:
    https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html.
    """
    nodes, node = env.number("AWS_BATCH_JOB_NUM_NODES"), env.number("AWS_BATCH_JOB_NODE_INDEX")
    index = (node - env.number("AWS_BATCH_JOB_MAIN_NODE_INDEX", 0)) % max(nodes, 1)
    address = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    host = env.text(address) if index else env.get(address) or socket.gethostname()
    where = CoordinatorAddress(host, PORT)
    return env.cluster(nodes, index if node < nodes else node, where)


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
    where = CoordinatorAddress.parse(str(trainers[0]), "TF_CONFIG")
    return variables.cluster(len(trainers), first + index, where, servers=servers)


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


_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_BY_HAND = "TPU_WORKER_HOSTNAMES (all hosts, with commas between) and TPU_WORKER_ID"


def read_tpu(env: ClusterVariables) -> Cluster:
    """Read one or several TPU slices, with one process per host."""
    name = "TPU_PROCESS_ADDRESSES" if env.get("TPU_PROCESS_ADDRESSES") else "TPU_WORKER_HOSTNAMES"
    workers = [_host(worker) for worker in env.text(name).split(",")]
    slices, slice_ = env.number("MEGASCALE_NUM_SLICES", 1), env.number("MEGASCALE_SLICE_ID", 0)
    worker = env.number("TPU_WORKER_ID", None if len(workers) > 1 else 0)
    if worker >= len(workers):
        raise ConfigError(
            f"TPU_WORKER_ID={worker}, and {name} has only {len(workers)} hosts, "
            f"counted from 0. Set both to the values of the slice."
        )
    first = env.get("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else workers[0]
    host = _host(first) or env.text("MEGASCALE_COORDINATOR_ADDRESS")
    return env.cluster(
        slices * len(workers),
        slice_ * len(workers) + worker,
        CoordinatorAddress(host, PORT),
        kind="TPU slice" if slices == 1 else f"{slices} TPU slices",
    )


def _host(address: str) -> str:
    """Return the host of an address with or without a port."""
    host, _, port = address.strip().rpartition(":")
    return host if host and port.isdigit() and ":" not in host else address.strip()


def detect_tpu_vm(environ: Mapping[str, str], root: Path) -> Cluster | None:
    """Return the slice that this TPU VM is a host of, by its metadata server.

    The server is asked only on a machine with TPU chips, and not if JAX computes elsewhere; then
    the answer is None at once. Attributes as in jax/_src/clusters/cloud_tpu_cluster.py of jax 0.12.

    Raises:
        ConfigError: if the answers are malformed.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if "TPU_SKIP_MDS_QUERY" in environ or (platforms and "tpu" not in platforms):
        return None
    if not has_tpu_chips(root):
        return None
    host = next(filter(None, map(environ.get, VARIABLES)), HOST)
    try:
        worker = read_attribute(host, "agent-worker-number")
        if worker is None:  # a virtual machine with TPU chips that is no host of a slice
            return None
        hosts = _parse_endpoints(read_attribute(host, "worker-network-endpoints") or "")
        tpu_env = _parse_tpu_env(read_attribute(host, "tpu-env") or "")
        kind = tpu_env.get("ACCELERATOR_TYPE") or read_attribute(host, "accelerator-type") or ""
    except NoAnswerError as error:
        return Cluster(
            warning=f"this machine has TPU chips, and {error}: this process trains by itself. If "
            f"the machine is one of several hosts of a slice, set {_BY_HAND}."
        )
    values = {"TPU_WORKER_ID": worker.strip(), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
    slices = {name: environ.get(name) or tpu_env.get(name, "") for name in _SLICES}
    cluster = read_tpu(ClusterVariables(values | slices, "TPU"))
    note = f"by the metadata server at {host}{f': {kind.strip()}' if kind.strip() else ''}"
    return dataclasses.replace(cluster, note=note)


def _parse_endpoints(text: str) -> list[str]:
    """Return the hosts: the names themselves, or in an older form `name:id:address` each."""
    hosts = []
    for worker in text.strip().split(","):
        parts = worker.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise ConfigError(
                f"the metadata server of this TPU VM says worker-network-endpoints={text[:80]!r}, "
                f"which is no list of hosts. Set {_BY_HAND} instead."
            )
        hosts.append(parts[-1])
    return hosts


def _parse_tpu_env(text: str) -> dict[str, str]:
    """Return the values of `tpu-env`, a line each: `MEGASCALE_NUM_SLICES: '2'`."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


HOST = "metadata.google.internal"
# Host or address of another server: the first is of Google's own libraries (google/auth/
# environment_vars.py of google-auth), the second of JAX too.
VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
TIMEOUT = 2.0  # seconds for one answer; the server is on the machine's own host
ATTEMPTS = 3
PAUSE = 0.5  # seconds between two attempts
LONGEST = 1 << 20  # bytes of an answer


class NoAnswerError(Exception):
    """The metadata server gave no answer in time."""


def read_attribute(host: str, name: str) -> str | None:
    """Return the text of an attribute of this virtual machine; None if it has none of this name.

    Raises:
        NoAnswerError: if the server does not answer, after three attempts of two seconds each,
            or another program answers in its place.
    """
    why = ""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE if attempt else 0)
        try:
            status, answer = _get_attribute(host, name)
        except (OSError, http.client.HTTPException) as error:
            why = f"{error or type(error).__name__}"
            continue
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status == HTTPStatus.OK:
            return answer
        why = f"HTTP {status}"
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:  # the same question has the same answer
            break
    raise NoAnswerError(f"its metadata server at {host} does not answer ({why})")


def _get_attribute(host: str, name: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT)  # by no proxy
    with closing(connection):
        path = f"/computeMetadata/v1/instance/attributes/{quote(name)}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        text, flavor = answer.read(LONGEST), answer.getheader("Metadata-Flavor")
    # Google's server says so in each answer, and google-auth checks the same
    # (google/auth/compute_engine/_metadata.py, `ping`).
    if answer.status == HTTPStatus.OK and flavor != "Google":
        raise http.client.HTTPException("another program answers")
    return answer.status, text.decode(errors="replace")
