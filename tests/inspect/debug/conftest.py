"""Fixtures shared by the tests of debugging."""

from pathlib import Path

import pytest
from quick_study import at_home, write_study


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """Return the config of a small study in the test's folder."""
    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    return path.relative_to(tmp_path)
