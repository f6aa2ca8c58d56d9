"""A run whose checkpoints are copied to an object store resumes from there, bit for bit."""

import os
import shutil
import signal
import uuid
from pathlib import Path

import numpy as np
import pytest
from quick_study import at_home, config_of, trained, write_study

from jtrain.checkpoint import layout, object_store_layout, seal
from jtrain.cli import main
from jtrain.data import TokenFiles
from jtrain.data.sources.files import find_files
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import ConfigError, DataError
from jtrain.io.object_store import ObjectStore

CONFIG = "configs/quick.yaml"
RUN = Path("runs/quick")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store() -> str:
    pytest.importorskip("fsspec")
    return f"memory://{uuid.uuid4()}/runs"


def parameters(run: Path, step: int) -> dict[str, str]:
    """Return the fingerprint of each leaf of a step, after verifying its bytes."""
    layout.check_valid(run / "checkpoints", step)
    return layout.read_record(run / "checkpoints", step)["fingerprints"]


@pytest.mark.thorough
def test_a_run_whose_directory_is_gone_comes_back_and_ends_as_it_would_have(
    store: str, tmp_path: Path
):
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


@pytest.mark.thorough
def test_a_finished_run_copies_what_is_missing_and_keeps_the_best(store: str):
    settings = [f"checkpoint.store={store}", "checkpoint.keep=1", "checkpoint.best=highest loss"]
    trained(CONFIG, *settings)
    objects = ObjectStore(f"{store}/quick")
    best, newest = object_store_layout.list_copies(objects)
    assert best < newest == 12, "the loss falls, so the highest is an early one"
    object_store_layout.remove(objects, 12, object_store_layout.object_sizes(objects)[12])
    assert trained(CONFIG, *settings).why == "the run had already finished; nothing was trained"
    assert object_store_layout.list_copies(objects) == [best, 12]


def stop_at(last: int):
    """Return a hook that asks the run to end, as a supervisor does."""

    def hook(step, numbers):
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


@pytest.mark.thorough
def test_another_run_of_the_same_name_in_the_store_is_refused(store: str):
    setting = f"checkpoint.store={store}"
    assert trained(CONFIG, setting, "steps=1", "log.every=1").status == "done"
    shutil.rmtree("runs/quick")
    trained(CONFIG, "steps=1", "log.every=1")
    with pytest.raises(ConfigError, match=r"holds another run of this name .*name=quick-2"):
        trained(CONFIG, setting, "steps=1", "log.every=1")


def test_a_store_that_is_no_address_is_refused():
    with pytest.raises(
        ConfigError, match=r"checkpoint.store=/mnt/disk: must be an address such as s3://"
    ):
        config_of(CONFIG, ["checkpoint.store=/mnt/disk"])


def test_copies_are_listed_verified_fetched_and_removed(
    store: str, capsys: pytest.CaptureFixture[str]
):
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
    assert typed("rm", address, "--damaged")[1].startswith("removed: 12;")
    code, said = typed("rm", address, "--step", "10")
    assert code == 2
    assert "last valid copy" in said
    assert typed("rm", address, "--step", "10", "--force")[0] == 0
    code, said = typed("ls", address)
    assert code == 2
    assert "is no copy of a run" in said


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "s3://b/runs/x"],
        ["sample", "s3://b/runs/x"],
        ["replay", "s3://b/runs/x", "--step", "3"],
        ["diff", "s3://b/runs/x", "s3://b/runs/y"],
        ["report", "s3://b/runs/x"],
        ["run", CONFIG, "init_from.path=s3://b/runs/x"],
    ],
    ids=lambda words: words[0],
)
def test_what_cannot_read_a_store_says_what_to_type(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert "jtrain ckpt fetch s3://b/runs/x" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["ckpt", "export", "quick", "--out", "s3://b/x.safetensors"],
        ["ckpt", "fetch", "s3://b/runs/x", "--out", "s3://b/runs/y"],
        ["report", "quick", "--out", "s3://b/x.html"],
        ["data", "prepare", "text.txt", "--out", "s3://b/tokens"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_is_written_to_this_disk_alone_makes_no_folder_of_an_address(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    Path("text.txt").write_text("a text\n" * 9)
    RUN.mkdir(parents=True)
    assert main(words) == 2
    assert "a local path is needed" in capsys.readouterr().err
    assert not Path("s3:").exists()


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
    with pytest.raises(DataError, match=r"no such object\. .* holds .*1\.txt"):
        find_files(f"{store}/data/a/none.txt")
    with pytest.raises(DataError, match="is a Path, which cannot be an address of an object store"):
        find_files(Path(f"{store}/data/a/1.txt"))


def test_tokens_of_a_store_are_those_of_the_disk(store: str):
    Path("text.txt").write_text("a text\n" * 9)
    prepare(Path("text.txt"), Path("tokens"), tokenizing=ByteTokens(), by="line", shard=23)
    data = ObjectStore(f"{store}/tokens")
    for file in Path("tokens").iterdir():
        data.send(file, file.name)
    here, there = TokenFiles("tokens"), TokenFiles(f"{store}/tokens")
    np.testing.assert_array_equal(here[0 : len(here)], there[0 : len(there)])
    assert here.fingerprint() == there.fingerprint()


def test_a_copy_without_a_seal_is_no_checkpoint(store: str):
    trained(CONFIG, f"checkpoint.store={store}", "steps=2", "log.every=1", "checkpoint.every=1")
    objects = ObjectStore(f"{store}/quick")
    objects.remove([f"checkpoints/2/{seal.SEAL}"])
    shutil.rmtree("runs/quick")
    assert main(["ckpt", "fetch", f"{store}/quick"]) == 0
    assert sorted(p.name for p in Path("runs/quick/checkpoints").iterdir()) == ["1"]
