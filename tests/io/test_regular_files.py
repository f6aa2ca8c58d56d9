"""Files are opened in one way, and only regular ones; rows survive a full disk."""

import os
import pwd
import re
import resource
import socket
from pathlib import Path

import pytest
from faulty_disks import files_of_at_most

from jtrain.data.sources.files import cache_dir
from jtrain.io.environment import user_cache_dir
from jtrain.io.jsonl import JsonlWriter, read_rows
from jtrain.io.regular_files import TooLargeError, open_regular, parse_json, read_bytes, read_json
from jtrain.train.runtime import usual_directory


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_that_the_disk_refuses_are_written_later_and_reported_by_sync(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = JsonlWriter(path)
    rows.append({"step": 1})
    with files_of_at_most(30):
        rows.append({"step": 2, "loss": 0.1 + 0.2})  # is cut in its middle
        rows.append({"step": 3})
        assert steps(path) == [1]
        with pytest.raises(OSError, match="too large"):
            rows.sync()
    rows.append({"step": 4})
    rows.sync()
    rows.close()
    assert steps(path) == [1, 2, 3, 4]
    assert read_rows(path)[1]["loss"] == 0.1 + 0.2


def test_a_regular_file_is_read_and_written_as_by_open(tmp_path: Path):
    path = tmp_path / "a"
    with open_regular(path, "wb") as file:
        file.write(b"one")
    with open_regular(path, "ab", buffering=0) as file:
        file.write(b" two")
    with open_regular(path, "r+b") as file:
        file.write(b"O")
    assert read_bytes(path, most=7) == b"One two"
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(tmp_path / "link", most=7) == b"One two"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_an_irregular_file_is_refused_at_once_by_its_kind(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("/dev/zero") if kind == "device" else Path("x")
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            listener.bind("x")
        words = {"pipe": "a named pipe", "folder": "a directory"}.get(kind, f"a {kind}")
        for mode in ("rb", "ab", "wb", "r+b"):
            with pytest.raises(OSError, match=f"is {words}, and should be a file"):
                open_regular(path, mode)


def test_a_file_longer_than_the_limit_is_not_read(tmp_path: Path):
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLargeError, match="is longer than 1,000,000 bytes"):
        read_bytes(path, most=1_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000, "kB"


@pytest.mark.parametrize(
    "deep", ["[" * 65 + "]" * 65, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 10**6]
)
def test_json_nested_without_end_is_refused(deep: str, tmp_path: Path):
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_json(deep)
    (tmp_path / "deep.json").write_text(deep)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        read_json(tmp_path / "deep.json")


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Be a user without a name and without HOME, as in a container that runs as a number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_user_without_a_home_has_it_in_the_folder(nobody: Path):
    with pytest.raises(RuntimeError):
        Path.home()
    assert Path(user_cache_dir()) == nobody / ".cache"
    assert cache_dir() == nobody / ".cache/jtrain/data"
    assert usual_directory() == nobody / ".cache/jtrain/compiled"


ROOT = Path(__file__).parents[2] / "jtrain"
OPENS = re.compile(
    r"\.read_text\(|\.read_bytes\(|(?<![\w.`])(?<!def )open\(|\bos\.open\(|"
    r"\bfdopen\(|tarfile\.open\(|np\.(load|memmap|fromfile|loadtxt|genfromtxt)\(|GGUFReader\(|"
    r"(Parquet|Zip|Tar|Gzip)File\(|json\.load\(|\.from_file\("
)
WRITES = re.compile(r"[\"'][wa]b?[\"']|O_WRONLY|O_DIRECTORY|os\.devnull")
KERNEL = "a file of Linux, of /proc or /sys"
OWN = "a file of the package itself, or of its own cache"
EJECTED = "code of an ejected file, which opens its own"
EXEMPT = {
    "io/regular_files.py": "the one way", "cli/init.py": OWN,
    "data/batches/row_cache.py": "files that this object has made",
    "data/images/image_dataset.py": "mapped after its header was read in the one way",
    "data/known_sets.py": OWN, "distributed/accelerators.py": KERNEL,
    "distributed/heartbeat.py": KERNEL,
    "inspect/eject/assemble.py": OWN, "inspect/eject/pieces/rows.py": EJECTED,
    "inspect/eject/pieces/safetensors.py": EJECTED, "inspect/eject/pieces/tokens.py": EJECTED,
    "inspect/eject/pieces/token_files.py": EJECTED,
    "inspect/report/page.py": OWN, "io/lazy_names.py": OWN, "parallel/program_cache.py": OWN,
    "train/fit_data.py": "an advice", "train/hooks/speed.py": KERNEL,
    "train/processes.py": "the experiment's own code, which is run",
}  # fmt: skip


def openings(file: Path) -> list[str]:
    """Return the lines that open a file to read it, where none is opened in the one way."""
    text = file.read_text()
    if "jtrain.io.regular_files import" in text:
        return []
    return [line for line in text.splitlines() if OPENS.search(line) and not WRITES.search(line)]


def test_files_of_a_user_are_opened_in_one_way():
    names = {file.relative_to(ROOT).as_posix(): openings(file) for file in ROOT.rglob("*.py")}
    assert {name for name, lines in names.items() if lines} == EXEMPT.keys()
