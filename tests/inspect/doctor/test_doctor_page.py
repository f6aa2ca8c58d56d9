"""docs/accelerators.md has a row for each fault, and each fault has a test."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.inspect.doctor.examine import CHECKS

ROOT = Path(__file__).parents[3]


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
