"""A script of several processes: an error in one soon ends all, and its output is shown."""

import sys
import time
from pathlib import Path

import pytest
from cases import by_name

from jtrain.distributed.launcher import launch

SCRIPT = Path(__file__).with_name("failing_process.py")
HOW = {
    "python": (1, "RuntimeError: nobody catches it"),
    "jtrain": (2, "jtrain.errors.DataError: nobody catches this"),
    "closed": (1, "RuntimeError: nobody catches it"),
    "again": (1, "RuntimeError: nobody catches it"),
    "code": (7, ""),
}


@pytest.mark.parametrize("how", by_name(list(HOW), ["jtrain"], pytest.mark.thorough))
def test_an_error_in_one_ends_all(how: str, capfd: pytest.CaptureFixture[str]):
    began, (code, words) = time.monotonic(), HOW[how]
    assert launch([sys.executable, str(SCRIPT), how], processes=2, devices=1) == code
    assert time.monotonic() - began < 250, "JAX waits 300 s for the others at the end of Python"
    *said, last = capfd.readouterr().err.splitlines()
    assert last == f"process 1 failed (exit code {code}), and all were ended"
    assert words in said or not words
