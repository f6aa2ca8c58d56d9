"""Clusters of pods and cloud machines: Kubernetes, SkyPilot, AWS Batch, TF_CONFIG, slices of TPUs.

Their variables say it all, except on a TPU VM, whose metadata server is asked.
"""

import dataclasses
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from jtrain.distributed.accelerators import has_tpu_chips
from jtrain.distributed.cluster.cluster import PORT, Cluster, ClusterVariables, CoordinatorAddress
from jtrain.errors import ConfigError
from jtrain.io.regular_files import parse_json


def read_jax(env: ClusterVariables) -> Cluster:
    """Read JAX's own variables, which Kubeflow Trainer sets for the pods of a TrainJob.

    xpk sets the address alone, beside numbers of its own: NNODES and NODE_RANK for pods with GPUs,
    JAX_PROCESS_COUNT and PROCESSES_IN_JOB for pods without. Source: AI-Hypercomputer/xpk,
    src/xpk/core/docker_resources.py.
    """
    own = env.get("JAX_NUM_PROCESSES")
    if not own and env.get("NODE_RANK") and env.get("NNODES"):
        processes, index = env.number("NNODES"), env.number("NODE_RANK")
    elif not own and env.get("JAX_PROCESS_COUNT") and env.get("PROCESSES_IN_JOB"):
        before = env.number("JOB_INDEX", 0) * env.number("PROCESSES_IN_JOB")
        processes = env.number("JAX_PROCESS_COUNT")
        index = before + env.number("JOB_COMPLETION_INDEX")
    else:
        processes, index = env.number("JAX_NUM_PROCESSES"), env.number("JAX_PROCESS_ID")
    address = env.text("JAX_COORDINATOR_ADDRESS")
    if not re.search(r":\d+$", address):
        by_cpus = env.get("JAX_PROCESS_COUNT")  # then the port is free to choose
        port = env.get("JAX_COORDINATOR_PORT") if by_cpus else env.text("JAX_COORDINATOR_PORT")
        address = f"{address}:{port or PORT}"
    where = CoordinatorAddress.parse(address, "JAX_COORDINATOR_ADDRESS")
    return Cluster(processes=processes, index=index, coordinator=where)


def read_job_set(env: ClusterVariables) -> Cluster:
    """Read one replicated job of a JobSet; the names of its pods are known beforehand."""
    name, job = env.text("JOBSET_NAME"), env.text("REPLICATED_JOB_NAME")
    pods, jobs = env.number("PODS_PER_JOB"), env.number("JOBS", 1)
    return Cluster(
        processes=pods * jobs,
        index=env.number("JOB_INDEX", 0) * pods + env.number("JOB_COMPLETION_INDEX"),
        coordinator=CoordinatorAddress(f"{name}-{job}-0-0.{name}", PORT),
    )


def read_jax_job(env: ClusterVariables) -> Cluster:
    """Read a JAXJob of Kubeflow's training operator, the predecessor of Kubeflow Trainer.

    Source: pkg/controller.v1/jax/envvar.go of kubeflow/training-operator.
    """
    where = CoordinatorAddress(env.text("COORDINATOR_ADDRESS"), env.number("COORDINATOR_PORT"))
    processes, index = env.number("NUM_PROCESSES"), env.number("PROCESS_ID")
    return Cluster(processes=processes, index=index, coordinator=where)


def read_sky_pilot(env: ClusterVariables) -> Cluster:
    """Read the nodes of a SkyPilot task, with one process per node."""
    return Cluster(
        processes=env.number("SKYPILOT_NUM_NODES"),
        index=env.number("SKYPILOT_NODE_RANK"),
        coordinator=CoordinatorAddress(env.text("SKYPILOT_NODE_IPS").split()[0], PORT),
    )


def read_aws_batch(env: ClusterVariables) -> Cluster:
    """Read a multi-node parallel job of AWS Batch: its main node is process 0.

    The main node alone has no address of the main node. Source:
    https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html.
    """
    nodes, node = env.number("AWS_BATCH_JOB_NUM_NODES"), env.number("AWS_BATCH_JOB_NODE_INDEX")
    index = (node - env.number("AWS_BATCH_JOB_MAIN_NODE_INDEX", 0)) % max(nodes, 1)
    address = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    host = env.text(address) if index else env.get(address) or socket.gethostname()
    return Cluster(processes=nodes, index=index, coordinator=CoordinatorAddress(host, PORT))


TASKS = ("chief", "ps", "worker")
_EXAMPLE = (
    'TF_CONFIG=\'{"cluster": {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}, '
    '"task": {"type": "worker", "index": 0}}\''
)


def read_tf_config(env: ClusterVariables) -> Cluster:
    """Read TF_CONFIG: the chief is process 0, else the first worker; the workers follow.

    With parameter servers (`ps`) the chief coordinates, and the servers come before the workers. An
    evaluator is a cluster of its own.

    Raises:
        ConfigError: if the variable is not JSON, or does not define a cluster.

    Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.
    """
    text = env.text("TF_CONFIG")
    or_alone = f"Set {_EXAMPLE}; or unset it to run in one process."
    try:
        found = parse_json(text)
        task = found["task"]
        kind, number = task["type"], task.get("index", 0)
        if kind == "evaluator":
            return Cluster(role="evaluates")
        addresses = {name: list(found["cluster"].get(name, ())) for name in TASKS}
        trainers = [address for name in TASKS for address in addresses[name]]
        unknown = found["cluster"].keys() - {*TASKS, "evaluator"}
        if unknown or not 0 <= number < len(addresses[kind]):
            raise KeyError(kind)
        index = sum(len(addresses[name]) for name in TASKS[: TASKS.index(kind)]) + number
        where = CoordinatorAddress.parse(trainers[0], "TF_CONFIG")
    except (KeyError, IndexError, TypeError, AttributeError, ConfigError):
        raise ConfigError(
            f"TF_CONFIG is {text[:200]!r}, in which `cluster` should list the addresses HOST:PORT "
            f"of tasks of the types {', '.join(TASKS)}, and `task` one of those, counted from 0. "
            f"{or_alone}"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"TF_CONFIG is not JSON: {error}. It begins {text[:40]!r}. {or_alone}"
        ) from None
    servers = len(addresses["ps"])
    if servers and len(addresses["chief"]) != 1:
        raise ConfigError(
            "TF_CONFIG has tasks of type ps, and no task of type chief, which coordinates them. "
            "Set a chief in cluster, and start its process too."
        )
    return Cluster(processes=len(trainers), index=index, coordinator=where, servers=servers)


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
    return Cluster(
        kind="TPU slice" if slices == 1 else f"{slices} TPU slices",
        processes=slices * len(workers),
        index=slice_ * len(workers) + worker,
        coordinator=CoordinatorAddress(host, PORT),
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
    elsewhere = "TPU_SKIP_MDS_QUERY" in environ or (platforms and "tpu" not in platforms)
    if elsewhere or not has_tpu_chips(root):
        return None
    host = next(filter(None, map(environ.get, VARIABLES)), HOST)
    try:
        worker = read_attribute(host, "agent-worker-number")
        if worker is None:  # a virtual machine with TPU chips that is not a host of a slice
            return None
        hosts = _parse_endpoints(read_attribute(host, "worker-network-endpoints") or "")
        # A line each: `MEGASCALE_NUM_SLICES: '2'`.
        lines = (read_attribute(host, "tpu-env") or "").splitlines()
        pairs = (line.partition(":") for line in lines)
        tpu_env = {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
        kind = tpu_env.get("ACCELERATOR_TYPE") or read_attribute(host, "accelerator-type") or ""
    except NoAnswerError as error:
        return Cluster(
            warning=f"this machine has TPU chips, and {error}: this process trains by itself. If "
            f"the machine is one of several hosts of a slice, set {_BY_HAND}."
        )
    values = {"TPU_WORKER_ID": worker.strip(), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
    slices = {name: environ.get(name) or tpu_env.get(name, "") for name in _SLICES}
    env = ClusterVariables(values | slices, "TPU")
    note = f"by the metadata server at {host}{f': {kind.strip()}' if kind.strip() else ''}"
    return dataclasses.replace(read_tpu(env), by=env.used, note=note)


def _parse_endpoints(text: str) -> list[str]:
    """Return the hosts: the names themselves, or in an older form `name:id:address` each."""
    hosts = []
    for worker in text.strip().split(","):
        parts = worker.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise ConfigError(
                f"the metadata server of this TPU VM says worker-network-endpoints={text[:80]!r}, "
                f"which is not a list of hosts. Set {_BY_HAND} instead."
            )
        hosts.append(parts[-1])
    return hosts


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
    import urllib.error
    import urllib.request
    from http import HTTPStatus, client

    address = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # by no proxy
    why: object = ""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE if attempt else 0)
        try:
            with opener.open(request, timeout=TIMEOUT) as answer:
                # Google's server says so in each answer, and google-auth checks the same
                # (google/auth/compute_engine/_metadata.py, `ping`).
                if answer.headers["Metadata-Flavor"] == "Google":
                    return answer.read(LONGEST).decode(errors="replace")
                why = "another program answers"
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            why = f"HTTP {error.code}"
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:  # it would answer the same again
                break
        except (OSError, client.HTTPException) as error:
            why = getattr(error, "reason", error) or type(error).__name__
    raise NoAnswerError(f"its metadata server at {host} does not answer ({why})")
