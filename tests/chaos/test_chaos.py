"""A few trials of each row of the chaos suite, its driver, and what its trials find."""

import json
import shutil
from pathlib import Path

import pytest

from chaos import __main__ as driver
from chaos import launched
from chaos.laid import AGAIN, RUN, SEEN, STEPS
from chaos.layouts import ALONE, batches, differences, trained, uninterrupted
from chaos.results import Results
from chaos.rows import ROWS, Row
from chaos.slurm.packages import NoSlurmError
from chaos.trial import Trial
from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import read_record

SEEDS = {  # `test_the_promise_holds_once` takes the first seed of the rows in QUICK
    "sigkill": [1, 2], "crash_point": [40, *range(1, 150, 29)], "power_cut": [1, 2],
    "failing_write": [100, 33, 140, 247], "full_disk_run": [1, 5, 11], "corruption": [1, 2],
    "no_place": [1, 2, 5], "end_in_a_save": [0, 1, 2, 3], "worker_kill": [1],
    "worker_exception": [1], "hang": [1], "signal_at_random": [1, 2], "server_worker_kill": [0],
    "server_kill": [0], "server_run_kill": [0], "injected": [1, 2], "bit_flip": [1, 2],
    "calm": [1, 2], "layouts": [6], "slurm_kill": [1], "slurm_stop": [1, 2],
}  # fmt: skip
QUICK = ["crash_point", "failing_write", "corruption", "no_place", "injected", "bit_flip", "calm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all trials, which share a compilation cache."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUICK)
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


MADE: list[tuple[str, int]] = []


def make_trial_function(name: str, passes: bool = True):
    def trial(seed: int, folder: Path) -> Trial:
        MADE.append((name, seed))
        return Trial(name, seed, passes or seed != 3, 0.25, "found | so")

    return trial


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    MADE.clear()
    rows = {
        "one": Row("one holds", "never", make_trial_function("one"), trials=4, faults=10),
        "other": Row(
            "other holds", "", make_trial_function("other", False), trials=lambda folder: 2
        ),
    }
    monkeypatch.setattr(driver, "ROWS", rows)
    return rows


def run(folder: Path, *words: object) -> int:
    return driver.main([*map(str, words), "--folder", str(folder)])


def test_a_full_run_resumes_where_it_was_stopped(tmp_path: Path, rows: dict[str, Row]):
    del rows
    assert run(tmp_path, "--full", "--only", "one", "--trials", 2) == 0
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes() + b'{"trial": {"na')  # a kill tore the last line
    MADE.clear()
    assert run(tmp_path, "--full") == 0
    assert sorted(MADE) == [("one", 3), ("one", 4), ("other", 1), ("other", 2)]
    assert run(tmp_path, "--full", "--seed", 3) == 70, "the third of the other row fails"
    assert sorted(Results(path).of("one")) == [1, 2, 3, 4, 5, 6]
    MADE.clear()
    assert run(tmp_path, "--failed") == 70
    assert MADE == [("other", 3)]


def write_rows(folder: Path, *parts: dict[int, dict[int, int]]) -> Path:
    """Write the rows that each process read, by step."""
    folder.mkdir()
    for process, steps in enumerate(parts):
        lines = [json.dumps([step, rows]) + "\n" for step, rows in steps.items()]
        (folder / SEEN.format("then", process)).write_text("".join(lines))
    return folder


def test_batches_are_the_same_however_processes_share_them(tmp_path: Path):
    whole = {step: {row: 10 * step + row for row in range(4)} for step in range(1, STEPS + 1)}
    part = lambda *rows: {step: {row: of[row] for row in rows} for step, of in whole.items()}
    expected = batches(write_rows(tmp_path / "whole", whole))
    assert batches(write_rows(tmp_path / "parts", part(0, 1), part(2, 3))) == expected
    assert batches(write_rows(tmp_path / "copies", part(0, 1, 2, 3), part(2, 3, 0, 1))) == expected
    other = {**whole, STEPS: {**whole[STEPS], 3: 7}}
    assert batches(write_rows(tmp_path / "other", other)) != expected
    with pytest.raises(ValueError, match="row 3 of step 50 was read with two contents"):
        batches(write_rows(tmp_path / "two", whole, other))
    with pytest.raises(ValueError, match="no process read all rows of step 50"):
        batches(write_rows(tmp_path / "few", {**whole, STEPS: {0: 500}}))


@pytest.mark.slow
def test_the_same_layout_is_bitwise_and_each_difference_is_found(tmp_path: Path):
    alone, place, step = uninterrupted(tmp_path), tmp_path / "stopped", 6
    place.mkdir()
    assert trained(place, ALONE, stop=step) == trained(place, ALONE, stop=0) == []
    assert differences(place, alone, step) == (0.0, [])
    ends = [run / RUN / "checkpoints" for run in (place, alone)]
    names = list(read_record(ends[0], STEPS)["fingerprints"])
    one, other = (read_arrays(end, STEPS, names) for end in ends)
    assert {name: one[name].tobytes() for name in names} == {n: other[n].tobytes() for n in names}

    rows = place / RUN / "steps.jsonl"
    losses = [json.loads(line) for line in rows.read_text().splitlines()]
    losses[-1]["loss"][-1] *= 1.0001
    rows.write_text("".join(json.dumps(row) + "\n" for row in losses))
    shutil.rmtree(place / AGAIN / f"{step}")
    shutil.copytree(ends[0] / f"{STEPS}", place / AGAIN / f"{step}")
    difference, faults = differences(place, alone, step)
    assert difference == pytest.approx(1e-4, rel=0.01)
    assert "losses differ by 1.0e-04 from those of one device" in faults[-1]
    assert "seal.json: is of step 50" in faults[0]


@pytest.mark.slow
def test_a_different_result_is_found(tmp_path: Path):
    homes = [launched.home_of(tmp_path, name) for name in ("one", "same", "other")]
    config = homes[2] / "configs" / "hurt.yaml"
    config.write_text(config.read_text() + "seed: 1\n")
    for home in homes:
        with launched.start_run(home, 1) as run:
            assert run.wait() == 0, run.words()
    assert launched.differences(homes[0], homes[1]) == ""
    rows = homes[1] / "runs" / "hurt" / "metrics.jsonl"
    rows.write_bytes(rows.read_bytes() + rows.read_bytes().splitlines(keepends=True)[-1])
    assert "metrics.jsonl" in launched.differences(homes[0], homes[1])
    assert launched.differences(homes[0], homes[2]) != ""
    assert (homes[0] / "runs" / "hurt" / "checkpoints" / f"{launched.STEPS}").is_dir()
