"""What a fresh install gives: the package from any folder, its names, its types, its configs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jtrain as jt

ROOT = Path(__file__).parent.parent


def python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.thorough
def test_is_found_from_the_folder_that_the_clone_lies_in(tmp_path: Path):
    (tmp_path / "jtrain" / "jtrain").mkdir(parents=True)  # as the clone and the package in it
    found = python("import jtrain; print(jtrain.__file__); jtrain.fit", tmp_path)
    assert Path(found).name == "__init__.py"


def test_tab_completion_shows_what_a_user_may_name():
    shown = {name for name in dir(jt) if not name.startswith("_")}
    assert {"fit", "evaluate", "predict", "Mean", "run", "optim", "testing"} <= shown
    assert not shown & {"importlib", "sys", "ModuleType", "TYPE_CHECKING", "given"}
    for name in shown:
        assert getattr(jt, name) is not None
    assert set(jt.__all__) <= set(dir(jt))


@pytest.mark.thorough
def test_packages_need_no_import_of_their_own(tmp_path: Path):
    code = "import jtrain as jt; print(jt.optim.AdamW(lr=1e-3).lr, jt.data.Arrays.__name__)"
    assert python(code, tmp_path) == "0.001 Arrays"


@pytest.mark.thorough
def test_type_checkers_find_the_types(tmp_path: Path):
    pytest.importorskip("pyright", reason="pip install -e '.[dev]'")
    script = tmp_path / "mine.py"
    script.write_text("import jtrain as jt\n\nstep: str = jt.fit(None, {}, {}, steps=3).step\n")
    (tmp_path / "pyrightconfig.json").write_text("{}")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert '"int" is not assignable to "str"' in done.stdout, done.stdout
    assert (ROOT / "jtrain" / "py.typed").exists(), "mypy looks for it"


def test_the_wheel_has_the_experiments_and_the_configs(tmp_path: Path):
    pytest.importorskip("hatchling", reason="pip install hatchling hatch-vcs")
    pytest.importorskip("hatch_vcs", reason="pip install hatchling hatch-vcs")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for folder in ("experiments", "configs"):
        here = {f"jtrain/shipped/{folder}/{path.name}" for path in (ROOT / folder).glob("*.*")}
        assert here <= names
    data = {
        "jtrain/py.typed",
        "jtrain/inspect/report/page.css",
        "jtrain/data/text/shakespeare/plays.txt.xz",
    }
    assert data <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
