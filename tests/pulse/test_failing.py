"""A script of several processes: an error in one of them ends all, at once and with its words."""

import sys
import time
from pathlib import Path

import pytest

from jtrain.launch import launch

SCRIPT = Path(__file__).with_name("failing_process.py")


@pytest.mark.parametrize(("kind", "code"), [("python", 1), ("jtrain", 2)])
def test_an_error_in_one_ends_all(kind: str, code: int, capfd: pytest.CaptureFixture[str]):
    began = time.monotonic()
    assert launch([sys.executable, str(SCRIPT), kind], processes=2, devices=1) == code
    assert time.monotonic() - began < 60, "JAX waits 300 s for the others at the end of Python"
    *_, error, last = capfd.readouterr().err.splitlines()
    assert error.endswith("Error: nobody catches this")
    assert last == f"process 1 failed (exit code {code}), and all were ended"
