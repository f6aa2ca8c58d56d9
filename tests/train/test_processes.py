"""Two processes with four devices each take the steps of one process with one device."""

from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close, distance
from layouts import strategy
from one_process import NAMES, ROWS, SIZE, STEPS, walk
from two_processes import in_two_processes

pytestmark = pytest.mark.thorough  # test_launched_runs.py has two processes by default
SCRIPT = Path(__file__).with_name("one_process.py")
PATIENCE = 240  # seconds; alone on two cores it takes about 20


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> list[dict]:
    """Return the output of each of the two processes."""
    folder = tmp_path_factory.mktemp("processes")
    files = [folder / f"{index}.npz" for index in range(2)]
    words = lambda port, index: (port, str(index), "2", files[index])
    in_two_processes(SCRIPT, words, patience=PATIENCE)
    return [dict(np.load(file)) for file in files]


@pytest.fixture(scope="module")
def alone() -> dict:
    return walk(strategy("single", 1))


def part(results: dict, name: str) -> dict:
    return {
        what.removeprefix(f"{name}/"): value
        for what, value in results.items()
        if what.startswith(f"{name}/")
    }


@pytest.mark.parametrize("name", NAMES)
def test_take_the_steps_of_one_device(processes, alone, name):
    for process in processes:
        got = part(process, name)
        assert np.abs(got["losses"] / alone["losses"] - 1).max() <= 1e-6
        leaves = sorted(what for what in alone if what.startswith("params"))
        assert len(leaves) == 4
        assert distance([got[x] for x in leaves], [alone[x] for x in leaves]) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_count_every_row_of_an_evaluation_once(processes, alone, name):
    for process in processes:
        got = part(process, name)
        assert (got["rows"], alone["rows"]) == (ROWS, ROWS)
        assert got["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert got["accuracy"] == pytest.approx(alone["accuracy"], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_come_to_the_same_bits(processes, name):
    first, second = (part(process, name) for process in processes)
    assert first.keys() == second.keys()
    for what in first.keys() - {"read"}:
        assert first[what].tobytes() == second[what].tobytes(), what


def test_read_only_their_own_rows(processes, alone):
    first, second = (process[f"{NAMES[0]}/read"] for process in processes)
    assert len(first) == len(second) == STEPS * SIZE / 2
    together = np.concatenate([x.reshape(STEPS, -1) for x in (first, second)], 1)
    np.testing.assert_array_equal(together, alone["read"].reshape(STEPS, SIZE))
    epoch = together[:2].ravel().tolist()
    assert len(set(epoch)) == 2 * SIZE, "no row twice in an epoch"


def test_take_several_steps_in_one_call(processes, alone):
    for process in processes:
        assert_close(process["stacked"], alone["losses"][:2], 1e-6)


def test_refuse_what_is_made_for_one(processes):
    said = str(processes[1]["refused"])
    assert "parallel.kind=single runs in one process" in said
    assert "Take parallel.kind=mirrored" in said
    assert "Take parallel.impl=shard_map" in said


def test_a_hook_of_one_process_ends_the_calls_of_both():
    script = SCRIPT.with_name("hooks_of_one_process.py")
    in_two_processes(script, lambda port, index: (port, str(index)), patience=PATIENCE)
