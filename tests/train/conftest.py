"""What runs of the study come to: each trained once, read only."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from quick_study import at_home, kept

from jtrain.train.run_result import RunResult


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """Work in an empty folder, and compile nothing twice."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def unbroken(run_of, compiled: Path) -> Callable[..., dict[str, bytes]]:
    """Return what an uninterrupted run with some settings comes to, bit for bit."""

    @functools.cache
    def come_to(*settings: str) -> dict[str, bytes]:
        home, outcome = run_of(*settings)
        with pytest.MonkeyPatch.context() as patch:
            at_home(home, patch, compiled)
            return kept(outcome)

    return come_to


@pytest.fixture
def finished(run_of, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> RunResult:
    """Work in the home of a finished run, `runs/quick`, which all tests read and none changes."""
    home, outcome = run_of()
    at_home(home, monkeypatch, compiled)
    return outcome


@pytest.fixture
def finished_copy(copy_of) -> RunResult:
    """Work in a copy of the home of the finished run, which a test may change."""
    return copy_of()
