"""Every test of an experiment runs in a directory of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a run and its path."""
    from quick_study import at_home  # jtrain, which the hook of jaxtyping wants to see imported

    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    return tmp_path
