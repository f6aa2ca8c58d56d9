"""Checkpoints and files that name code, or paths out of their directory; 40 that try to escape."""
# ruff: noqa: E501  (a case reads best on a line)

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit import unwanted, watched
from quick_study import at_home, config_of, trained, write_study

from jtrain.checkpoint import CheckpointManager, seal
from jtrain.checkpoint.init_from import open_source
from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.data import TokenFiles
from jtrain.data.text.prepare import AppendLog, prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import CheckpointError, ConfigError, DataError, UserError
from jtrain.io.safetensors import read_tensors
from jtrain.train.restore import evaluate_run

OWNED = "open('OWNED', 'w').close()\nclass Owned:\n    def __init__(self, *a, **k): open('OWNED', 'w').close()\n"
LIKE = {"params": {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, "step": jax.ShapeDtypeStruct((), jnp.int32)}  # fmt: skip
EXPORTED = "out.safetensors"
PICKLE = b"cos\nsystem\n(S'touch OWNED'\ntR."


def edit(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def change_file(step: Path) -> None:
        (path,) = step.rglob(name)
        said = json.loads(path.read_text())
        change(said)
        path.write_text(json.dumps(said))

    return change_file


def replace_texts(said: dict, value: str) -> None:
    """Replace every text by a name of Python."""
    for key, old in said.items():
        if isinstance(old, dict):
            replace_texts(old, value)
        elif isinstance(old, str):
            said[key] = value


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda step: next(iter(step.rglob(name))).write_bytes(content)


def add(name: str, content: bytes = PICKLE) -> Callable[[Path], None]:
    return lambda step: (step / name).write_bytes(content) and None


def link_file(name: str, target: str) -> Callable[[Path], None]:
    def link(step: Path) -> None:
        path = next(iter(step.rglob(name)))
        path.unlink()
        path.symlink_to(target)

    return link


CASES: dict[str, Callable[[Path], None]] = {
    "a handler of its own": edit("_CHECKPOINT_METADATA", lambda x: x.update(item_handlers="owned.Owned")),
    "a class for each text": edit("_CHECKPOINT_METADATA", lambda x: replace_texts(x, "owned.Owned")),
    "a class in the tree": edit("_METADATA", lambda x: replace_texts(x, "owned.Owned")),
    "a custom type": edit("_METADATA", lambda x: x.update(custom_metadata={"py/object": "owned.Owned"})),
    "a function in what is said": edit("about.json", lambda x: x["about"].update({"__reduce__": ["os.system", ["touch OWNED"]]})),
    "a config that is code": edit("about.json", lambda x: x["about"].update(config={"experiment": "owned", "_target_": "owned.Owned"})),
    "a leaf of a type to import": edit("about.json", lambda x: x["leaves"].update({"params/w": "owned.Owned[4, 4]"})),
    "a leaf with a path": edit("about.json", lambda x: x["leaves"].update({"../../../owned": "float32[4, 4]"})),
    "a pickle for the tree": replace("_METADATA", PICKLE),
    "a pickle for what is said": replace("about.json", PICKLE),
    "a pickle for the sharding": replace("_sharding", PICKLE),
    "a pickle for the manifest": replace("manifest.ocdbt", PICKLE),
    "a pickle beside it": add("model.pkl"),
    "Python beside it": add("__init__.py", OWNED.encode()),
    "a link to a secret": link_file("_METADATA", "/etc/passwd"),
    "a link for what is said": link_file("about.json", "/etc/passwd"),
    "a sharding of another world": edit("_sharding", lambda x: replace_texts(x, "owned.Owned")),
}  # fmt: skip
INSTALLED = [Path(place) for place in {*sys.path, *sysconfig.get_paths().values()} if place]
INSTALLED += [Path("/proc"), Path("/sys"), Path("/dev")]


@pytest.fixture(name="kept", scope="module")
def _kept(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "run" / "checkpoints"
    state = {"params": {"w": jnp.ones((4, 4))}, "step": jnp.int32(3)}
    with CheckpointManager(directory) as checkpoints:
        checkpoints.save(3, state, {"config": {"experiment": "quick"}})
    with CheckpointManager(directory) as checkpoints:
        checkpoints.restore(3, LIKE)  # imports everything that a restore needs
    return directory


def read_in_every_way(directory: Path) -> list[str]:
    """Read a checkpoint by all readers; return the refusals."""
    told = []
    for reads in (
        lambda: CheckpointManager(directory).restore(3, LIKE),
        lambda: CheckpointManager(directory).about(3),
        lambda: open_source(str(directory.parent)).read({"w": LIKE["params"]["w"]}),
    ):
        try:
            reads()
        except UserError as error:
            told.append(str(error))
    run = str(directory.parent)
    for verb in ("ls", "verify", "show"):
        main(["ckpt", verb, run])
    main(["ckpt", "diff", run, run])
    main(["ckpt", "export", run, "--out", EXPORTED])
    return told


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed anew", "as it was sealed"])
@pytest.mark.parametrize("hurt", CASES.values(), ids=CASES)
def test_hostile_checkpoints(hurt, sealed: bool, kept: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("owned", None)
    (tmp_path / "owned.py").write_text(OWNED)
    directory = tmp_path / "run" / "checkpoints"
    shutil.copytree(kept.parent, tmp_path / "run")
    hurt(directory / "3")
    if sealed:  # by an attacker: a seal is not a signature
        (directory / "3" / seal.SEAL).unlink()
        seal.seal(directory / "3", 3)
    with watched(everywhere=True) as events:
        told = read_in_every_way(directory)
    wrong = unwanted(events, tmp_path, *INSTALLED)
    assert not [line for line in wrong if not is_expected(line)], told
    assert "owned" not in sys.modules
    assert not list(tmp_path.rglob("OWNED"))
    if not sealed:
        assert told, "changes after the seal are refused"
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err


def is_expected(line: str) -> bool:
    """Return whether an event is an import, a dataclass or the requested file."""
    loads = line.startswith(("import(", "exec(", "compile(")) and "owned" not in line
    return loads or line.startswith("os.mkdir('.'") or EXPORTED in line


CONFIG = "configs/quick.yaml"
NAMES = ["..", ".", "../x", "a/../../x", "/x", "/tmp/x", "a/b/c", "~", "~/x", "a\\..\\x", "a\nb", "a\0b", ".hidden", "-rf", "x" * 300, "$HOME", "a;b", "a*", "runs/x"]  # fmt: skip
LINKS = ["config.yaml", "run.json", "metrics.jsonl", "speed.jsonl", "log.txt", "samples.txt", "checkpoints", "pictures", "checkpoints/1", "checkpoints/.writer"]  # fmt: skip
MEMBERS = ["../secret", "/etc/passwd", "..", "", "a/../../secret", "sub/../secret", "link", 3, None, "x\0y", "..\\secret"]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    write_study(home)
    at_home(home, monkeypatch, compiled)
    (tmp_path / "secret").write_bytes(b"\x00" * 64)
    return home


def test_hostile_paths_in_the_name_of_a_run(home: Path):
    for name in NAMES:
        with pytest.raises(ConfigError, match="must be the name of a directory in runs/"):
            resolve(CONFIG, [f"name={json.dumps(name)}"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", LINKS)
def test_hostile_paths_by_a_link_in_a_run(name: str, home: Path, tmp_path: Path):
    """Refuse the run before training, and read or write nothing through the link."""
    outside, link = tmp_path / "outside", Path("runs/quick") / name
    outside.mkdir()
    target = outside / "file" if "." in name else outside
    if target != outside:
        target.write_text("{}")
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    before = {p: p.stat().st_mtime_ns for p in (outside, *outside.iterdir())}
    with pytest.raises(ConfigError, match=r"is a link to .*Remove the link \(rm "):
        trained(CONFIG)
    with pytest.raises(UserError):
        evaluate_run(config_of(CONFIG), Path("runs/quick"))
    assert {p: p.stat().st_mtime_ns for p in (outside, *outside.iterdir())} == before
    link.unlink()
    assert trained(CONFIG, "steps=1", "log.every=1", "checkpoint.every=0").status == "done", (
        "as it says"
    )


def index(folder: Path, name: object) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"which is not in the same folder|names no files"):
        read_tensors(path)


def token_folder(folder: Path, name: object) -> None:
    (folder / "text.txt").write_text("a text\n" * 9)
    prepare(folder / "text.txt", folder / "tokens", tokenizing=ByteTokens(), by="line", shard=23)
    header = json.loads((folder / "tokens" / "header.json").read_text())
    header["shards"][0]["name"] = name
    (folder / "tokens" / "header.json").write_text(json.dumps(header))
    if name == "link":
        (folder / "tokens" / "link").symlink_to(folder.parent / "secret")
    with pytest.raises(DataError, match=r"which is not in the same folder|should be the header of"):
        TokenFiles(folder / "tokens")


def unfinished(folder: Path, name: object) -> None:
    known = [{"name": name, "count": 4, "crc32": 0}]
    with pytest.raises(DataError, match="which is not in the same folder"):
        AppendLog(folder, "tokens-{:05}.bin", np.dtype("<u2"), 9, known)


@pytest.mark.parametrize("reads", [index, token_folder, unfinished])
def test_hostile_paths_in_a_file(reads: Callable[[Path, object], None], home: Path, tmp_path: Path):
    before = (tmp_path / "secret").stat()
    for number, name in enumerate(MEMBERS):
        folder = home / f"{number}" / "x"
        folder.mkdir(parents=True)
        (folder.parent / "secret").write_bytes(b"mine")
        (folder / "link").symlink_to(tmp_path / "secret")
        reads(folder, name)
    after = (tmp_path / "secret").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.thorough
def test_a_run_in_a_linked_folder_is_resumed(home: Path, tmp_path: Path):
    """Accept a separate disk for runs/, which is not an attack."""
    (tmp_path / "disk").mkdir()
    Path("runs").symlink_to(tmp_path / "disk")
    assert trained(CONFIG, "steps=1", "log.every=1", "checkpoint.every=0").status == "done"
    assert os.listdir(tmp_path / "disk") == ["quick"]


def test_tensors_that_share_bytes_are_refused(tmp_path: Path):
    """1,000 tensors that each span a file would take a thousand times its size in memory."""
    path = tmp_path / "x.safetensors"
    for places in ([(0, 8), (4, 12)], [(0, 16), (4, 8)], [(8, 16), (0, 12)], [(0, 8), (0, 8)]):
        path.write_bytes(safetensors(places))
        with pytest.raises(CheckpointError, match=r"at \d+ to \d+ overlaps [ab]"):
            read_tensors(path)
    path.write_bytes(safetensors([(8, 16), (8, 8), (0, 8), (16, 16), (0, 0)]))
    sizes = {name: array.size for name, array in read_tensors(path).items()}
    assert sizes == {"a": 2, "b": 0, "c": 2, "d": 0, "e": 0}


def safetensors(places: list[tuple[int, int]]) -> bytes:
    """Return a file of 16 bytes with tensors a, b ... at these offsets."""
    entry = lambda first, last: {
        "dtype": "F32",
        "shape": [(last - first) // 4],
        "data_offsets": [first, last],
    }
    header = {name: entry(*place) for name, place in zip("abcde", places, strict=False)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)
