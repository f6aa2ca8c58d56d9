"""One Slurm for all tests of this folder, and jobs on it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_jobs import Script, output, submit

from chaos.launched import home_of
from chaos.slurm.cluster import SlurmCluster, running_cluster
from chaos.slurm.packages import PACKAGES_FOLDER, NoSlurmError


@pytest.fixture(scope="session")
def slurm(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """A controller and two nodes; the packages stay in pytest's cache, or in PACKAGES_FOLDER."""
    assert pytestconfig.cache is not None
    cached = os.environ.get(PACKAGES_FOLDER) or pytestconfig.cache.mkdir("slurm")
    try:
        with running_cluster(Path(cached), tmp_path_factory.mktemp("slurm") / "it") as cluster:
            yield cluster
    except NoSlurmError as reason:
        pytest.skip(f"nothing of Slurm is tested: {reason}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a study of 60 short steps, `configs/hurt.yaml`."""
    return home_of(tmp_path, "home")


@pytest.fixture
def script(slurm: SlurmCluster, home: Path) -> Script:
    """Run lines of bash as a job in `home`, and return its exit code and its output."""

    def run(lines: str, *options: str, **environ: str) -> tuple[int, str]:
        number = submit(slurm, home, f"#!/bin/bash\n{lines}\n", *options, **environ)
        job = slurm.wait(number)
        return job.code, output(home, number)

    return run
