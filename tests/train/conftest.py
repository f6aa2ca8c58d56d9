"""The study that trains in a moment, and what its runs come to: each trained once, read only."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from quick_study import at_home, kept, trained, write_study

from jtrain.train.run_result import RunResult

CONFIG = "configs/quick.yaml"


class Trained(NamedTuple):
    """A run of the study, in a home of its own: read it only."""

    home: Path
    outcome: RunResult
    kept: dict[str, bytes]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """Work in an empty folder, and compile nothing twice."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def study_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Path:
    """Work in a folder with the study, and return the path of its config."""
    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    return path


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Callable[..., Trained]:
    """Train the study with some settings, the first time that a test asks for them."""
    found: dict[tuple[str, ...], Trained] = {}

    def train(*settings: str) -> Trained:
        if settings not in found:
            with pytest.MonkeyPatch.context() as patch:
                home = tmp_path_factory.mktemp("trained")
                write_study(home)
                at_home(home, patch, compiled)
                outcome = trained(CONFIG, *settings)
                found[settings] = Trained(home, outcome, kept(outcome))
        return found[settings]

    return train


@pytest.fixture
def unbroken(run_of: Callable[..., Trained]) -> Callable[..., dict[str, bytes]]:
    """Return what an uninterrupted run with some settings comes to, bit for bit."""
    return lambda *settings: run_of(*settings).kept


@pytest.fixture
def finished(run_of: Callable[..., Trained], monkeypatch, compiled: Path) -> RunResult:
    """Work in the home of a finished run, `runs/quick`, which all tests read and none changes."""
    at_home(run_of().home, monkeypatch, compiled)
    return run_of().outcome


@pytest.fixture
def finished_copy(run_of: Callable[..., Trained], tmp_path, monkeypatch, compiled) -> RunResult:
    """Work in a copy of the home of the finished run, which a test may change."""
    shutil.copytree(run_of().home, tmp_path / "home")
    at_home(tmp_path / "home", monkeypatch, compiled)
    return run_of().outcome
