"""Faults planted in a real machine: `jtrain doctor` finds each, and its line to type mends it.

`jtrain doctor` runs in a shell with the fault, then again after the line of the finding was typed.
docs/accelerators.md has a row for each fault, and each fault has a test.
"""

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import install, refuse_call, write_files

from jtrain.cli import main
from jtrain.inspect.doctor.examine import CHECKS

ROOT = Path(__file__).parents[3]
DOCTOR = "python -m jtrain doctor --json --only"
PLUGIN = "jax_plugins/xla_cuda12/__init__.py"

# `preexec_fn` forks, of which JAX warns once a test before has imported it; the child only execs.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def test_the_page_has_each_fault_of_a_test():
    page = (ROOT / "docs/accelerators.md").read_text()
    page = page.partition("\n## Doctor")[2].partition("\n## ")[0]
    rows = re.findall(r"`([a-z]+-[a-z-]+)`", page.partition("| check |")[2].partition("\n\n")[0])
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_doctor_*.py"))
    assert len(rows) == len(set(rows)) > 20
    assert [name for name in rows if f'"{name}"' not in text and name != "python-old"] == []
    assert re.findall(r"^\| \*\*(\w+)\*\* \|", page, re.MULTILINE) == list(CHECKS)


def test_one_json_object_in_base_units(tmp_path, capsys):
    only = "packages,disk,cluster"
    begun = time.perf_counter()
    code = main(["doctor", "--json", "--only", only, "--directory", str(tmp_path)])
    took = time.perf_counter() - begun
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 2)
    assert {finding["check"] for finding in found["findings"]} == {*only.split(",")}
    assert found["facts"]["disk"]["write"]["seconds"] > 0
    assert found["facts"]["disk"]["space"]["free"] > 0
    assert 0 < found["seconds"] <= took
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_whole_examination(tmp_path):
    command = [sys.executable, "-m", "jtrain", "doctor", "--json", "--timeout", "250"]
    command += ["--directory", str(tmp_path)]
    environ = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 2)
    assert [finding["status"] for finding in found["findings"] if finding["check"] == "devices"]
    assert len(found["facts"]["devices"]) == 8
    assert list(tmp_path.iterdir()) == []


def shell(
    script: str,
    place: Path,
    environ: Mapping[str, str],
    preexec: Callable[[], None] | None = None,
    code: int | None = None,
) -> str:
    """Run a script in a clean environment; return its stdout."""
    usual = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(place),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=place,
        env={**usual, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=preexec,
        check=False,
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def found(output: str) -> dict[str, dict[str, Any]]:
    """Return the findings of the last JSON line, by name."""
    return {each["name"]: each for each in json.loads(output.splitlines()[-1])["findings"]}


# Found from files and variables alone: a tenth of a second each.


@pytest.mark.thorough
def test_a_disk_that_cannot_flush(tmp_path):
    plant = lambda: refuse_call("fsync", errno.EIO)
    report = found(shell(f"{DOCTOR} disk", tmp_path, {}, plant, code=2))
    assert "The device fails" in report["disk-write"]["found"]


@pytest.mark.thorough
def test_a_full_disk(tmp_path):
    """Mount 1 MB of memory, in a namespace of its own."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    space = ["unshare", "--mount", *user]
    if subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no mounts of one's own")
    mount = "mkdir -p runs; mount -t tmpfs -o size=1m tmpfs runs"
    script = f"{' '.join(space)} bash -c '{mount}; {DOCTOR} disk'"
    report = found(shell(script, tmp_path, {}, code=2))
    assert "Make room" in report["disk-write"]["found"]
    assert "disk-full" in report


def test_an_old_python_gets_a_sentence(tmp_path):
    old = "import sys\nsys.version_info = (3, 10, 12, 'final', 0)\n"
    site = write_files(tmp_path / "site", {"sitecustomize.py": old})
    environ = {"PYTHONPATH": f"{ROOT}:{site}"}
    said = shell("python -m jtrain doctor", tmp_path, environ, code=2)
    assert said.startswith("jtrain needs Python 3.11 or newer, and this is 3.10.12 at ")
    assert said.count("\n") == 1
    assert "uv venv --python 3.12" in said
    said = shell("python -c 'import jtrain'", tmp_path, environ, code=1)
    assert said.splitlines()[-1].startswith("ImportError: jtrain needs Python 3.11 or newer")


@pytest.mark.thorough
def test_a_python_without_any_package(tmp_path):
    """All checks are made where neither jax nor pydantic can be imported."""
    report = found(shell(f"python -S -m {DOCTOR[10:]} packages,devices,disk", tmp_path, {}, code=2))
    assert report["jax-import"]["found"] == "jax is not installed"
    assert report["package-missing"]["remedy"].endswith("pip install jtrain")


# Found by starting JAX: a second or two each.


@pytest.mark.thorough
def test_a_platform_without_its_package(tmp_path):
    environ = {"JAX_PLATFORMS": "cuda"}
    finding = found(shell(f"{DOCTOR} devices", tmp_path, environ, code=2))["platform-missing"]
    assert "no package for cuda is installed" in finding["found"]
    after = shell(f"{finding['remedy']}; {DOCTOR} devices", tmp_path, environ)
    assert "platform-missing" not in found(after)


PLUGINS = {
    # As jax-cuda12-plugin 0.10.2 fails on a machine without a driver.
    "plugin-without-device": 'raise RuntimeError("Unable to load CUDA. Is it installed?")',
    "devices-crash": "import os; os.abort()",
    "devices-hang": "import time; time.sleep(60)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLUGINS)
def test_a_cuda_plugin_that_fails(tmp_path, name):
    """A plugin whose start fails, crashes or hangs is a finding, and not the end of doctor."""
    code = f"def initialize():\n    {PLUGINS[name]}\n"
    site = write_files(tmp_path / "site", {PLUGIN: code})
    install(site, jax__cuda12__plugin="0.10.2")
    environ = {"PYTHONPATH": f"{ROOT}:{site}"}
    options = "--timeout 6" if name == "devices-hang" else ""
    report = found(shell(f"{DOCTOR} devices {options}", tmp_path, environ))
    if name not in report and options:  # a busy machine takes longer to come to the plugin
        report = found(shell(f"{DOCTOR} devices --timeout 60", tmp_path, environ))
    assert name in report, report
    if name == "plugin-without-device":
        assert "Unable to load CUDA" in report[name]["found"]
        remedy = report[name]["remedy"]
        assert name not in found(shell(f"{remedy} >&2; {DOCTOR} devices", tmp_path, environ))
