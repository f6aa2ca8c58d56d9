"""The pairs of layouts cover all layouts, and a trial finds each kind of difference."""

import json
import shutil
from pathlib import Path

import pytest

from chaos.laid import AGAIN, RUN, SEEN, STEPS
from chaos.layouts import (
    ALONE,
    LAYOUTS,
    PAIRS,
    batches,
    differences,
    trained,
    uninterrupted,
)
from jtrain.checkpoint.inspect import read_arrays
from jtrain.checkpoint.layout import read_record


def test_forty_pairs_have_every_layout_on_both_sides():
    splits = {(kind, devices, processes) for kind, devices, processes in LAYOUTS}
    every = {
        (kind, devices, processes)
        for kind in ("data", "fsdp", "tensor")
        for devices in (2, 4, 8)
        for processes in (1, 2, 4)
        if devices >= processes
    }
    assert splits == {("single", 1, 1), *every}
    assert len(set(PAIRS)) == len(PAIRS) == 40
    assert {save for save, _ in PAIRS} == {restore for _, restore in PAIRS} == set(LAYOUTS)
    assert all(save != restore for save, restore in PAIRS)
    assert sum(save.processes != restore.processes for save, restore in PAIRS) >= 15


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
