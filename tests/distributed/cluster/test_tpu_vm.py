"""A TPU VM finds its slice by its metadata server, which is an HTTP server on the loopback here."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jtrain.distributed.cluster import detect, environments

PATH = "/computeMetadata/v1/instance/attributes/"
# As a v5litepod-16 answers: the names and forms of jax/_src/clusters/cloud_tpu_cluster.py.
SLICE = {
    "agent-worker-number": "2",
    "worker-network-endpoints": "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4",
    "accelerator-type": "v5litepod-16",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nTYPE: 'V5LITE_POD'\nWORKER_ID: '2'\n",
}
SLICES = {
    **SLICE,
    "tpu-env": (
        "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9:8080'\n"
        "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    ),
}


class Answers(http.server.ThreadingHTTPServer):
    """A metadata server with these attributes, and what it was asked."""

    daemon_threads = True

    def __init__(self, attributes: Mapping[str, str], late: bool, faults: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.attributes, self.late, self.faults = attributes, late, faults
        self.flavor, self.asked, self.over = "Google", [], threading.Event()
        self.host = f"127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as Google's server: only to a question with its header."""

    def do_GET(self) -> None:
        server, name = self.server, self.path.removeprefix(PATH)
        assert isinstance(server, Answers)
        server.asked.append(name)
        if server.late:
            server.over.wait(60)
        text = server.attributes.get(name)
        status = 404 if text is None else 200
        status = 503 if len(server.asked) <= server.faults else status
        status = status if self.headers["Metadata-Flavor"] == "Google" else 403
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Metadata-Flavor", server.flavor)
            self.end_headers()
            self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextlib.contextmanager
def answering(
    attributes: Mapping[str, str], *, late: bool = False, faults: int = 0
) -> Iterator[Answers]:
    with Answers(attributes, late, faults) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join(timeout=100)


@pytest.fixture
def chips(tmp_path: Path) -> Path:
    """The root of a machine with the PCI devices of a TPU v5e."""
    device = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1ae0\n")
    (device / "device").write_text("0x0063\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "TIMEOUT", 20.0)
    monkeypatch.setattr(environments, "PAUSE", 0.01)


def test_a_host_finds_its_slice(chips: Path):
    with answering(SLICE) as server:
        found = detect({"GCE_METADATA_IP": server.host}, root=chips)
    assert (found.kind, found.index, found.processes) == ("TPU slice", 2, 4)
    assert str(found.coordinator) == "10.0.0.1:8476"
    assert found.note == f"by the metadata server at {server.host}: v5litepod-16"
    assert "TPU_WORKER_ID=2" in found.variables
    same = detect(dict(found.by))
    assert (same.index, same.processes, same.coordinator) == (2, 4, found.coordinator)


def test_a_host_of_several_slices(chips: Path):
    with answering(SLICES) as server:
        found = detect({"GCE_METADATA_IP": server.host}, root=chips)
    assert (found.kind, found.index, found.processes) == ("2 TPU slices", 6, 8)
    assert str(found.coordinator) == "10.9.9.9:8476"


def test_a_machine_that_is_no_host_of_a_slice_is_one_process(chips: Path):
    with answering({}) as server:
        found = detect({"GCE_METADATA_IP": server.host}, root=chips)
    assert (found.kind, found.warning) == ("one process", "")
    assert server.asked == ["agent-worker-number"]


def test_a_fault_of_the_server_is_asked_again(chips: Path):
    with answering(SLICE, faults=2) as server:
        assert detect({"GCE_METADATA_IP": server.host}, root=chips).processes == 4
    assert server.asked[:3] == ["agent-worker-number"] * 3


def test_a_late_answer_is_not_waited_for_and_warned_of(chips: Path, monkeypatch):
    monkeypatch.setattr(environments, "TIMEOUT", 0.2)
    with answering(SLICE, late=True) as server:
        found = detect({"GCE_METADATA_IP": server.host}, root=chips)
    assert found.processes == 1, "it answers when this is over"
    (warning,) = found.describe()
    assert f"its metadata server at {server.host} does not answer (timed out)" in warning
    assert "set TPU_WORKER_HOSTNAMES (all hosts, with commas between) and TPU_WORKER_ID" in warning


def test_another_program_in_its_place_is_not_believed(chips: Path):
    with answering(SLICE) as server:
        server.flavor = "Other"
        found = detect({"GCE_METADATA_IP": server.host}, root=chips)
    assert found.processes == 1
    assert "another program answers" in found.warning


def test_the_server_is_asked_only_on_a_tpu_vm(chips: Path, tmp_path: Path):
    with answering(SLICE) as server:
        host = {"GCE_METADATA_IP": server.host}
        for environ, root in (
            (host, tmp_path / "no chips"),
            (host | {"JAX_PLATFORMS": "cpu"}, chips),
            (host | {"TPU_SKIP_MDS_QUERY": "1"}, chips),
            (host | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, chips),
            (host | {"JTRAIN_PROCESSES": "1"}, chips),
        ):
            assert detect(environ, root=root).processes == 1
        assert server.asked == []
