"""What the tests of this folder have in common."""

from pathlib import Path

import pytest
from quick_study import at_home, write_study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """The config of a small study, below the folder that a test is in."""
    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    return path.relative_to(tmp_path)
