"""A few trials of each row of the chaos suite; its driver runs all of them."""

from pathlib import Path

import pytest
from cases import by_name

from chaos.rows import ROWS
from chaos.slurm.packages import NoSlurmError

SEEDS = {  # `test_the_promise_holds_once` takes the first seed of the rows in QUICK
    "sigkill": [1, 2],
    "crash_point": [40, *range(1, 150, 29)],
    "power_cut": [1, 2],
    "failing_write": [100, 33, 140, 247],
    "full_disk_run": [1, 5, 11],
    "corruption": [1, 2],
    "no_place": [1, 2, 5],
    "end_in_a_save": [0, 1, 2, 3],
    "worker_kill": [1],
    "worker_exception": [1],
    "hang": [1],
    "signal_at_random": [1, 2],
    "server_worker_kill": [0],
    "server_kill": [0],
    "server_run_kill": [0],
    "injected": [1, 2],
    "bit_flip": [1, 2],
    "calm": [1, 2],
    "layouts": [6],
    "slurm_kill": [1],
    "slurm_stop": [1, 2],
}
QUICK = ["crash_point", "failing_write", "corruption", "no_place", "injected", "bit_flip", "calm"]
DEFAULT = ["injected"]  # test_seal.py and test_fingerprint.py find damage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all trials, which share a compilation cache."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize("name", by_name(QUICK, DEFAULT, pytest.mark.thorough))
def test_the_promise_holds_once(name: str, folder: Path):
    trial = ROWS[name].trial(SEEDS[name][0], folder)
    assert trial.passed, trial


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_the_promise_holds_a_few_times(name: str, folder: Path):
    for seed in SEEDS[name][name in QUICK :]:
        try:
            trial = ROWS[name].trial(seed, folder)
        except NoSlurmError as reason:
            pytest.skip(f"nothing of Slurm is tested: {reason}")
        assert trial.passed, trial
        assert (trial.name, trial.seed) == (name, seed), "else it could not be replayed"
