"""The trials of processes find a run with a different result."""

from pathlib import Path

import pytest

from chaos.launched import STEPS, differences, home_of, start_run


@pytest.mark.slow
def test_a_different_result_is_found(tmp_path: Path):
    homes = [home_of(tmp_path, name) for name in ("one", "same", "other")]
    config = homes[2] / "configs" / "hurt.yaml"
    config.write_text(config.read_text() + "seed: 1\n")
    for home in homes:
        with start_run(home, 1) as run:
            assert run.wait() == 0, run.words()
    assert differences(homes[0], homes[1]) == ""
    rows = homes[1] / "runs" / "hurt" / "metrics.jsonl"
    rows.write_bytes(rows.read_bytes() + rows.read_bytes().splitlines(keepends=True)[-1])
    assert "metrics.jsonl" in differences(homes[0], homes[1])
    assert differences(homes[0], homes[2]) != ""
    assert (homes[0] / "runs" / "hurt" / "checkpoints" / f"{STEPS}").is_dir()
