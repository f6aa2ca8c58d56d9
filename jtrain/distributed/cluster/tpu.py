"""TPU slices: by the variables of Google Kubernetes Engine, or by a TPU VM's metadata server."""

import dataclasses
import http.client
import time
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from jtrain.distributed.accelerators import has_tpu_chips
from jtrain.distributed.cluster.cluster import PORT, Cluster, ClusterVariables, CoordinatorAddress
from jtrain.errors import ConfigError

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
    server = MetadataServer(environ)
    try:
        worker = server.attribute("agent-worker-number")
        if worker is None:  # a virtual machine with TPU chips that is no host of a slice
            return None
        hosts = _parse_endpoints(server.attribute("worker-network-endpoints") or "")
        tpu_env = _parse_tpu_env(server.attribute("tpu-env") or "")
        kind = tpu_env.get("ACCELERATOR_TYPE") or server.attribute("accelerator-type") or ""
    except NoAnswerError as error:
        return Cluster(
            warning=f"this machine has TPU chips, and {error}: this process trains by itself. If "
            f"the machine is one of several hosts of a slice, set {_BY_HAND}."
        )
    values = {"TPU_WORKER_ID": worker.strip(), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
    slices = {name: environ.get(name) or tpu_env.get(name, "") for name in _SLICES}
    cluster = read_tpu(ClusterVariables(values | slices, "TPU"))
    note = f"by the metadata server at {server.host}{f': {kind.strip()}' if kind.strip() else ''}"
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


class MetadataServer:
    """Attributes of this virtual machine."""

    def __init__(self, environ: Mapping[str, str]):
        """Choose the server; nothing is sent."""
        self.host = next(filter(None, map(environ.get, VARIABLES)), HOST)

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute; None if the machine has none of this name.

        Raises:
            NoAnswerError: if the server does not answer, after three attempts of two seconds each,
                or another program answers in its place.
        """
        why = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE if attempt else 0)
            try:
                status, answer = self._get(name)
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
        raise NoAnswerError(f"its metadata server at {self.host} does not answer ({why})")

    def _get(self, name: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, timeout=TIMEOUT)  # by no proxy
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
