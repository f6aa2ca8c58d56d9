"""The loop by hand of docs/coordinator.md, run as a script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "coordinator.md"


@pytest.mark.thorough
def test_the_loop_of_the_page_trains(tmp_path: Path):
    *_, code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "loop.py").write_text(code)
    command = [sys.executable, "-W", "error", "loop.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr
    loss, weights = found.stdout.splitlines()
    assert float(loss.split()[1]) < 1e-2
    assert loss.endswith("after 400 updates")
    numbers = [float(word) for word in weights.split("[")[1].rstrip("]").split()]
    assert all(abs(number - i) < 0.1 for i, number in enumerate(numbers)), weights
