"""Reading a checkpoint runs no code that it names, and opens no file outside of it."""
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

from jtrain.checkpoint import CheckpointManager, seal
from jtrain.checkpoint.weights_source import open_source
from jtrain.cli import main
from jtrain.errors import UserError

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
    (tmp_path / "owned.py").write_text(OWNED)
    directory = tmp_path / "run" / "checkpoints"
    shutil.copytree(kept.parent, tmp_path / "run")
    hurt(directory / "3")
    if sealed:  # by an attacker: a seal is no signature
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


def test_hostile_checkpoints_are_17_in_two_ways():
    assert len(CASES) == 17


def test_a_tensor_file_is_read_by_numpy_alone(tmp_path: Path):
    header = {"__metadata__": {"format": "owned.Owned"}, "w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}  # fmt: skip
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.ones(16, np.float32).tobytes())
    with watched(everywhere=True) as events:
        found = open_source(str(path)).read({"w": LIKE["params"]["w"]})
    np.testing.assert_array_equal(found["w"], np.ones((4, 4)))
    assert not unwanted(events, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]
