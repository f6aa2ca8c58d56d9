"""A run whose checkpoints are copied to an object store resumes from there, bit for bit."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_environ import SAID
from quick_study import trained

from jtrain.checkpoint import layout, object_store_layout
from jtrain.checkpoint.uploader import CheckpointUploader
from jtrain.cli import main
from jtrain.data.sources.files import find_files
from jtrain.io.object_store import ObjectStore

pytestmark = pytest.mark.usefixtures("study_home", "cache")
CONFIG = "configs/quick.yaml"
TRAINER = importlib.import_module("jtrain.train.trainer")
RUN = Path("runs/quick")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store() -> str:
    pytest.importorskip("obstore")
    return f"file://{Path.cwd()}/bucket/runs"


def parameters(run: Path, step: int) -> dict[str, str]:
    """Return the fingerprint of each leaf of a step, after verifying its bytes."""
    layout.check_valid(run / "checkpoints", step)
    return layout.read_record(run / "checkpoints", step)["fingerprints"]


@pytest.mark.thorough
def test_a_run_whose_directory_is_gone_comes_back_and_ends_as_it_would_have(store: str, tmp_path):
    trained(CONFIG, "name=plain")
    plain = parameters(Path("runs/plain"), 12)
    setting = f"checkpoint.store={store}"
    stopped = trained(CONFIG, setting, hooks=[stop_at(7)])
    assert stopped.status == "stopped"
    assert 7 <= (kept := stopped.checkpoint or 0) < 12  # steps are dispatched ahead
    shutil.rmtree("runs/quick")
    done = trained(CONFIG, setting)
    assert done.status == "done"
    assert f"checkpoint {kept} and the run's files were fetched" in (RUN / "log.txt").read_text()
    assert parameters(RUN, 12) == plain
    rows = lambda name: (Path("runs") / name / "metrics.jsonl").read_bytes()
    assert rows("quick") == rows("plain")
    objects = ObjectStore(f"{store}/quick")
    assert object_store_layout.list_copies(objects) == [10, 12]
    assert b'"done"' in (objects.read("run.json") or b"")
    # What was done is done, and a copy that is missing is made good.
    object_store_layout.remove(objects, 12, object_store_layout.object_sizes(objects)[12])
    assert trained(CONFIG, setting).why == "the run had already finished; nothing was trained"
    assert object_store_layout.list_copies(objects) == [10, 12]
    # An older directory gets what is newer in the store.
    shutil.rmtree(RUN / "checkpoints" / "12")
    assert trained(CONFIG, setting).why == "the run had already finished; nothing was trained"


def stop_at(last: int):
    """Return a hook that asks the run to end, as a supervisor does."""

    def hook(step, numbers):
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


@pytest.mark.thorough
def test_the_processes_wait_for_the_last_upload(store: str, monkeypatch):
    order, finish = [], CheckpointUploader.finish
    upload = lambda *given: (finish(*given), order.append("upload"))
    monkeypatch.setattr(CheckpointUploader, "finish", upload)
    monkeypatch.setattr(TRAINER, "barrier", lambda: order.append("barrier"))
    trained(CONFIG, f"checkpoint.store={store}")
    assert order == ["upload", "barrier"]


@pytest.mark.thorough
def test_copies_are_listed_verified_fetched_and_removed(store: str, capsys):
    trained(CONFIG, f"checkpoint.store={store}")
    address = f"{store}/quick"

    def typed(*words: str) -> tuple[int, str]:
        code = main(["ckpt", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert typed("ls", address)[1].split("\n")[0].startswith("10  ")
    code, said = typed("verify", address)
    assert (code, said.count("valid")) == (0, 2)
    assert typed("show", address)[0] == 0
    assert "hold the same state" in typed("diff", address, "quick")[1]
    assert typed("export", f"{address}/checkpoints/10", "--out", "a.safetensors")[0] == 0
    assert typed("fetch", address, "--out", "runs/back")[0] == 0
    assert parameters(Path("runs/back"), 12) == parameters(RUN, 12)
    code, said = typed("fetch", address)
    assert code == 2
    assert "a run exists there" in said

    objects = ObjectStore(address)
    name = next(n for n in objects.sizes("checkpoints/12") if "/d/" in n)
    objects.write(name, b"other")
    code, said = typed("verify", address)
    assert code == 70
    assert "12  DAMAGED" in said
    code, said = typed("rm", address, "--damaged")
    assert code == 2
    assert "aws s3 rm" in said
    code, said = typed("ls", f"{address}-2")
    assert code == 2
    assert "is not a copy of a run" in said


def test_data_of_a_store_is_copied_once_and_again_when_it_changes(store: str):
    data = ObjectStore(f"{store}/data")
    data.write("a/1.txt", b"one")
    data.write("a/2.txt", b"two")
    data.write("a/3.bin", b"three")
    files = find_files(f"{store}/data/a/*.txt")
    assert [file.name for file in files] == ["1.txt", "2.txt"]
    assert [file.read_bytes() for file in files] == [b"one", b"two"]
    files[0].write_bytes(b"kept")
    assert find_files(f"{store}/data/a/1.txt")[0].read_bytes() == b"kept"  # it is not fetched again
    data.write("a/1.txt", b"other")
    assert find_files(f"{store}/data/a/1.txt")[0].read_bytes() == b"other"


SCRIPT = Path(__file__).with_name("stored_process.py")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield an empty bucket that this process and its children can reach."""
    pytest.importorskip("obstore", reason="pip install 'jtrain[s3]'")
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    _, port = served.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        address = f"http://127.0.0.1:{port}/jtrain-test"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT")).close()
        yield "s3://jtrain-test"
    served.stop()


def ran(home: Path, *words: str, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "run", "configs/quick.yaml", *words]
    env = {**os.environ, "KILL_AT": str(kill_at), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=home, env=env, **SAID)


@pytest.mark.thorough
@pytest.mark.parametrize("kill_at", [25, pytest.param(38, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_while_it_copies_resumes_elsewhere_bit_for_bit(
    kill_at: int, bucket: str, tmp_path: Path
):
    """Kill within the second copy, and at 38 near its seal (19 to 21 objects a copy)."""
    home = tmp_path
    store = f"checkpoint.store={bucket}/at-{kill_at}"
    plain = ran(home, "name=plain")
    assert plain.returncode == 0, plain.stderr
    killed = ran(home, store, kill_at=kill_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    objects = ObjectStore(f"{bucket}/at-{kill_at}/quick")
    before = object_store_layout.list_copies(objects)
    shutil.move(home / "runs" / "quick", tmp_path / "another-machine")
    done = ran(home, store)
    assert done.returncode == 0, done.stderr
    if before:
        assert f"checkpoint {before[-1]} and the run's files were fetched" in done.stdout
    prints = [
        layout.read_record(home / "runs" / name / "checkpoints", 12)["fingerprints"]
        for name in ("plain", "quick")
    ]
    assert prints[0] == prints[1]
    assert object_store_layout.list_copies(objects) == [10, 12]
    assert list(object_store_layout.object_sizes(objects)) == [10, 12]
