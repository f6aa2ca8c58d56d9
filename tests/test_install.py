"""A fresh install: the package's names and types, the wheel, its commands in an empty folder."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import jtrain as jt

ROOT = Path(__file__).parent.parent


def test_tab_completion_shows_what_a_user_may_name():
    shown = {name for name in dir(jt) if not name.startswith("_")}
    assert {"fit", "evaluate", "predict", "Mean", "run", "optim", "testing"} <= shown
    assert not shown & {"importlib", "sys", "ModuleType", "TYPE_CHECKING", "given"}
    for name in shown:
        assert getattr(jt, name) is not None
    assert set(jt.__all__) <= set(dir(jt))


TYPED = """\
import jtrain as jt

step: str = jt.fit(None, {}, {}, steps=3).step
layers: str = jt.models.Transformer().layers
batch: jt.types.Batch = {}
jt.data.Nothing
"""


@pytest.mark.thorough
def test_type_checkers_find_the_types(tmp_path: Path):
    pytest.importorskip("pyright", reason="pip install -e '.[dev]'")
    script = tmp_path / "mine.py"
    script.write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.count('"int" is not assignable to "str"') == 2, done.stdout
    assert '"Nothing" is not a known attribute' in done.stdout
    assert (ROOT / "jtrain" / "py.typed").exists(), "mypy looks for it"


@pytest.mark.thorough
def test_the_wheel_has_the_experiments_and_the_configs(built: Path):
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    for folder in ("experiments", "configs"):
        here = {f"jtrain/shipped/{folder}/{path.name}" for path in (ROOT / folder).glob("*.*")}
        assert here <= names
    data = {"jtrain/py.typed", "jtrain/inspect/report/page.css", "jtrain/data/plays/plays.txt.xz"}
    assert data <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


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
        command,
        cwd=cwd,
        env=env,
        text=True,
        timeout=1200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
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
    run = lambda folder, command: typed(["sh", "-c", command], home / folder, venv / "bin")
    outputs = [run(*each) for each in FIRST]
    assert "2 passed" in outputs[3]
    record = json.loads((home / "rings" / "runs" / "rings" / "run.json").read_text())
    assert record["status"] == "done"
    assert not list(home.glob("jtrain")), "the folder has only what the commands wrote"
