"""The study that the runs of this folder train, and a folder to train it in."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the study, and return its config."""
    from quick_study import write_study  # jtrain, which the hook of jaxtyping wants to see imported

    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def home(study_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside the study, whose processes have one device each and share what they compiled."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # with more devices XLA adds in another order
