"""The trials of processes pass, and would see a run that came to something else."""

from pathlib import Path

import pytest

from jtrain.testing.chaos.launched import STEPS, begun, differences, home_of
from jtrain.testing.chaos.processes import hang, signal_at_random, worker_exception, worker_kill


@pytest.mark.slow
@pytest.mark.parametrize("trial", [worker_kill, worker_exception, hang, signal_at_random])
def test_a_trial_passes(trial, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.getbasetemp() / "trials"
    folder.mkdir(exist_ok=True)
    told = trial(1, folder)
    assert told.passed, told


@pytest.mark.thorough
def test_another_result_is_seen(tmp_path: Path):
    homes = [home_of(tmp_path, name) for name in ("one", "same", "other")]
    config = homes[2] / "configs" / "hurt.yaml"
    config.write_text(config.read_text() + "seed: 1\n")
    for home in homes:
        with begun(home, 1) as run:
            assert run.wait() == 0, run.words()
    assert differences(homes[0], homes[1]) == ""
    rows = homes[1] / "runs" / "hurt" / "metrics.jsonl"
    rows.write_bytes(rows.read_bytes() + rows.read_bytes().splitlines(keepends=True)[-1])
    assert "metrics.jsonl" in differences(homes[0], homes[1])
    assert differences(homes[0], homes[2]) != ""
    assert (homes[0] / "runs" / "hurt" / "checkpoints" / f"{STEPS}").is_dir()
