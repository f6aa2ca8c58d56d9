"""The wheel and the sdist: built, checked, and used in an empty folder, as from a package index."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Four commands of the first page of the documentation, with the folder of each.
FIRST = (
    (".", "jtrain run shakespeare --fast"),
    (".", "jtrain init rings"),
    ("rings", "jtrain run configs/rings.yaml"),
    ("rings", "python3 -m pytest -q -W error"),
)
OWN = ("PYTHON", "PYTEST", "JTRAIN", "VIRTUAL_ENV")


def typed(command: list[str], cwd: Path, first: Path | None = None) -> str:
    """Return the output of a command, typed outside the clone; programs of `first` come first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    if first is not None:
        env["PATH"] = f"{first}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, timeout=1200, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an sdist, and of the wheel that was built from it."""
    pytest.importorskip("build", reason="pip install build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    typed([*command, str(ROOT)], folder)
    return folder


@pytest.mark.thorough
def test_an_index_would_take_them(built: Path):
    pytest.importorskip("twine", reason="pip install twine")
    files = [str(path) for path in built.iterdir()]
    assert len(files) == 2
    typed([sys.executable, "-m", "twine", "check", "--strict", *files], built)


@pytest.mark.thorough
def test_the_version_is_that_of_the_newest_tag(tmp_path: Path, built: Path):
    pytest.importorskip("hatch_vcs", reason="pip install hatch-vcs")
    source = tmp_path / "source"
    source.mkdir()
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        sdist.extractall(source, filter="data")
    (source,) = source.iterdir()
    (source / "PKG-INFO").unlink()  # the version of an sdist is that of its own
    for words in ("init -q", "add .", "commit -qm one", "tag v3.4.5"):
        who = ["-c", "user.name=one", "-c", "user.email=one@localhost"]
        typed(["git", *who, *words.split()], source)
    command = [sys.executable, "-m", "hatchling", "version"]
    assert typed(command, source).strip() == "3.4.5"
    typed(["git", *who, "commit", "-q", "--allow-empty", "-m", "two"], source)
    assert re.match(r"3\.4\.6\.dev1\+g", typed(command, source))


@pytest.mark.parametrize(
    "dependencies",
    [
        pytest.param("of these tests", marks=pytest.mark.thorough),
        pytest.param("from the index", marks=pytest.mark.slow),
    ],
)
def test_four_commands_in_an_empty_folder(dependencies: str, built: Path, tmp_path: Path):
    venv, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    typed([sys.executable, "-m", "venv", str(venv)], home)
    wheel = str(next(built.glob("*.whl")))
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if dependencies == "from the index":
        typed([*pip, wheel, "pytest"], home)
    else:  # those of the environment of these tests, which are at hand
        typed([*pip, "--no-deps", wheel], home)
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
        command = [str(venv / "bin" / "python"), "-c", "import jtrain; print(jtrain.__file__)"]
        assert typed(command, home).strip() == str(site / "jtrain" / "__init__.py")
    outputs = [
        typed(["sh", "-c", command], home / folder, venv / "bin") for folder, command in FIRST
    ]
    assert "2 passed" in outputs[3]
    record = json.loads((home / "rings" / "runs" / "rings" / "run.json").read_text())
    assert record["status"] == "done"
    assert not list(home.glob("jtrain")), "the folder has only what the commands wrote"
