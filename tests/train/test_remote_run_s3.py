"""Object store runs against a local S3 server: real requests, and processes that are killed."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_study import YAML, write_study

from jtrain.checkpoint import layout, object_store_layout
from jtrain.cli import main
from jtrain.data.sources.files import find_files
from jtrain.io.object_store import ObjectStore, ObjectStoreError

pytestmark = pytest.mark.thorough
RUN = Path(__file__).with_name("stored_process.py")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield an empty bucket that this process and its children can reach."""
    pytest.importorskip("s3fs", reason="pip install 'jtrain[s3]'")
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    _, port = served.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem().mkdir("jtrain-test")
        yield "s3://jtrain-test"
    served.stop()


def ran(home: Path, *words: str, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), "run", "configs/quick.yaml", *words],
        cwd=home,
        env={**os.environ, "KILL_AT": str(kill_at), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    write_study(tmp_path / "home", config=YAML)
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "home"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kill_at", [3, 18, 25, 38])
def test_a_run_that_is_killed_while_it_copies_resumes_elsewhere_bit_for_bit(
    kill_at: int, bucket: str, home: Path, tmp_path: Path
):
    """Kill within the first copy, the second, and at 38 near its seal (19 to 21 objects a copy)."""
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


def test_copies_in_s3_are_listed_verified_fetched_and_removed(
    bucket: str, home: Path, capsys: pytest.CaptureFixture[str]
):
    assert ran(home, f"checkpoint.store={bucket}/runs").returncode == 0
    address = f"{bucket}/runs/quick"
    for words, said in (
        (["ls", address], "10  "),
        (["verify", address], "12  valid"),
        (["show", address], "params/bias"),
        (["fetch", address, "--out", "runs/back"], "the run at step 12"),
        (["rm", address, "--step", "10"], "removed: 10"),
    ):
        assert main(["ckpt", *words]) == 0
        assert said in capsys.readouterr().out
    assert object_store_layout.list_copies(ObjectStore(address)) == [12]


def test_data_of_s3_is_read_by_its_path(bucket: str, home: Path):
    data = ObjectStore(f"{bucket}/data")
    data.write("a.txt", b"one")
    data.write("b.txt", b"two")
    assert [file.read_bytes() for file in find_files(f"{bucket}/data/*.txt")] == [b"one", b"two"]
    data.write("a.txt", b"another")
    assert find_files(f"{bucket}/data/a.txt")[0].read_bytes() == b"another"


def test_a_bucket_that_is_not_there_is_told_before_anything_is_trained(bucket: str, home: Path):
    with pytest.raises(ObjectStoreError, match="Create the bucket, or name an existing one"):
        ObjectStore("s3://no-such-bucket/runs").write("x", b"x")
    done = ran(home, "checkpoint.store=s3://no-such-bucket/runs")
    assert done.returncode == 70
    assert "Create the bucket, or name an existing one" in done.stderr
    assert "step" not in done.stdout
