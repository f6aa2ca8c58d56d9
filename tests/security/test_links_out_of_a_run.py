"""Readers of a foreign run never follow its links."""
# ruff: noqa: E501  (a list reads best on a line)

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit import watched
from quick_study import at_home, trained, write_study

from jtrain.checkpoint import layout
from jtrain.cli import main
from jtrain.io.regular_files import LinkError, open_regular, read_bytes

SECRET = b'{"step": 3, "loss": "THE-READERS-OWN"}\n'
PNG = b"\x89PNG\r\n\x1a\n" + SECRET
FILES = ["config.yaml", "run.json", "metrics.jsonl", "speed.jsonl", "steps.jsonl", "leaves.jsonl", "events.jsonl", "compiles.jsonl", "profile.json", "log.txt", "samples.txt", "pictures/a-3.png", "checkpoints/.writer", "checkpoints/2/about.json", "checkpoints/2/seal.json", "checkpoints/2/state/_METADATA", "checkpoints/2.bak"]  # fmt: skip
EVERYBODYS = ("config.yaml", "run.json", "checkpoints/2")
FOLDERS = ["checkpoints", "checkpoints/2", "checkpoints/2/state", "pictures"]
READERS = [
    ["report", "runs/quick"],
    ["diff", "runs/quick", "runs/other"],
    ["eval", "quick"],
    ["replay", "quick"],
    ["ckpt", "ls", "quick"],
    ["ckpt", "verify", "quick"],
    ["ckpt", "show", "quick", "--step", "2"],
    ["ckpt", "diff", "quick", "other"],
    ["ckpt", "export", "quick", "--step", "2", "--out", "out.safetensors"],
    ["ckpt", "rm", "quick", "--damaged"],
    ["run", "configs/quick.yaml", "steps=1", "name=new", "init_from.path=runs/quick"],
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[Path]:
    """Create a study with a run of two steps and a copy of it."""
    home = tmp_path_factory.mktemp("home")
    write_study(home)
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch, compiled)
        trained("configs/quick.yaml", "steps=2", "log.every=1", "checkpoint.every=1")
        shutil.copytree("runs/quick", "runs/other")
        yield home


@pytest.fixture
def outside(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a private folder of the reader, with a copy of the study."""
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    outside = tmp_path / "outside"
    shutil.copytree("runs/quick", outside)
    (outside / "secret").write_bytes(SECRET)
    (outside / "a-3.png").write_bytes(PNG)
    return outside


def link(name: str, outside: Path) -> None:
    """Replace a file or folder of the run by a link out of it."""
    path = Path("runs/quick") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    target = outside / ("a-3.png" if name.endswith(".png") else "secret")
    if name in FOLDERS:
        target = outside / name if (outside / name).is_dir() else outside
        for file in [each for each in target.rglob("*") if each.is_file()]:
            if file.name == "about.json":
                file.write_bytes(file.read_bytes().replace(b'"step"', b'"THE-READERS-OWN"'))
    path.symlink_to(target)


def cases() -> Iterator[Any]:
    """Yield every reader with every link; a quarter of the irrelevant pairs are thorough."""
    others = itertools.count()
    for name in FILES + FOLDERS:
        for words in READERS:
            quick = name in EVERYBODYS or words[0] == "report" or words[:2] == ["ckpt", "verify"]
            rest = pytest.mark.slow if next(others) % 4 else pytest.mark.thorough
            marks = () if quick else (rest,)
            yield pytest.param(name, words, marks=marks, id=f"{name}-{' '.join(words[:2])}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "words"), list(cases()))
def test_no_reader_of_a_run_follows_its_links(
    name: str, words: list[str], outside: Path, capfd: pytest.CaptureFixture[str]
):
    link(name, outside)
    before = {path for path in Path.cwd().rglob("*")}
    with watched(everywhere=True) as events:
        code = main(words)
    assert code in (0, 1, 2, 70)
    opened = [
        event
        for event in events
        if event.name in ("open", "os.listdir", "os.scandir")
        and not (event.name == "open" and event.args[2] & os.O_NOFOLLOW)
        and isinstance(event.args[0], str | bytes | os.PathLike)
        # The lock has an opener with O_NOFOLLOW, which has an event of its own.
        and not (event.args[1:2] == ("r+",) and str(event.args[0]).endswith(".writer"))
        and Path(os.fsdecode(event.args[0])).resolve().is_relative_to(outside)
    ]
    assert opened == []
    assert (outside / "secret").read_bytes() == SECRET
    said = "".join(capfd.readouterr())
    assert "THE-READERS-OWN" not in said
    assert "Traceback" not in said
    for path in {*Path.cwd().rglob("*")} - before:
        if path.is_file() and not path.is_symlink():
            assert b"THE-READERS-OWN" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("log.txt", "log.txt is a link to "),
        ("run.json", "run.json is a link to "),
        ("metrics.jsonl", "metrics.jsonl is a link to "),
        ("config.yaml", "config.yaml: cannot be read: is a link to "),
        ("pictures/a-3.png", "pictures/a-3.png is a link to "),
        ("pictures", "pictures is a link to "),
    ],
)
def test_the_report_names_the_skipped_file(
    name: str, words: str, outside: Path, capsys: pytest.CaptureFixture[str]
):
    link(name, outside)
    assert main(["report", "quick"]) == 0
    assert words in capsys.readouterr().err
    assert words in Path("runs/quick/report.html").read_text()


def test_a_linked_step_is_damaged_and_is_not_read(
    outside: Path, capsys: pytest.CaptureFixture[str]
):
    link("checkpoints/2", outside)
    assert layout.list_steps(Path("runs/quick/checkpoints")) == [1]
    assert main(["ckpt", "verify", "quick"]) == 70
    assert f"is a link to {outside / 'checkpoints' / '2'}" in capsys.readouterr().out
    assert main(["ckpt", "show", "runs/quick/checkpoints/2"]) != 0
    assert "is a link to" in capsys.readouterr().err


def test_linked_checkpoints_are_read_only_by_their_real_path(
    outside: Path, capsys: pytest.CaptureFixture[str]
):
    link("checkpoints", outside)
    assert main(["ckpt", "ls", "quick"]) == 2
    assert "name their real path; otherwise remove the link: rm " in capsys.readouterr().err
    assert main(["ckpt", "ls", str(outside / "checkpoints")]) == 0


def test_a_file_inside_is_opened_without_following_links(tmp_path: Path):
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    (run / "sub" / "file").write_bytes(b"inside")
    (tmp_path / "file").write_bytes(b"outside")
    assert read_bytes(run / "sub" / "file", most=9, inside=run) == b"inside"
    (run / "link").symlink_to("sub/file")
    (run / "folder").symlink_to(tmp_path)
    (run / "sub" / "up").symlink_to("../..")
    for path in ("link", "folder/file", "sub/up/file"):
        with pytest.raises(LinkError, match=r"is a link to .*, which is not followed"):
            read_bytes(run / path, most=9, inside=run)
    with pytest.raises(FileNotFoundError):
        read_bytes(run / "none", most=9, inside=run)
    with pytest.raises(NotADirectoryError):
        read_bytes(run / "sub" / "file" / "x", most=9, inside=run)
    with pytest.raises(IsADirectoryError):
        read_bytes(run / "sub", most=9, inside=run)
    (tmp_path / "way").symlink_to(run)  # the path to the run itself may be a link
    assert read_bytes(tmp_path / "way" / "sub" / "file", most=9, inside=tmp_path / "way")
    with open_regular(run / "new", "ab", inside=run) as file:
        file.write(b"x")
    assert (run / "new").read_bytes() == b"x"
