"""`jtrain sweep`: runs side by side, skipped runs, and the final table."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from plain_environ import run_python

from jtrain.cli import main
from jtrain.sweep import pool
from jtrain.sweep.pool import split_machine

pytestmark = pytest.mark.thorough

CONFIG = "configs/quick.yaml"
PRETEND = [sys.executable, str(Path(__file__).parent / "pretended.py"), CONFIG]
CORES = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(CORES) < 2, reason="one core is shared out among one run")


@pytest.fixture(autouse=True)
def _home(study_home: Path, monkeypatch: pytest.MonkeyPatch):
    pretend = lambda config, member: [*PRETEND, *member.settings]
    monkeypatch.setattr(pool, "member_command", pretend)


def stands(label: str, sweep: str = "quick-sweep") -> dict:
    return json.loads((Path("runs") / sweep / label / "run.json").read_text())


def tries(label: str, sweep: str = "quick-sweep") -> int:
    return len((Path("runs") / sweep / label / "tries.txt").read_text())


def told(capfd) -> dict:
    return json.loads(capfd.readouterr().out)


def test_a_grid_over_seeds_ends_in_a_table_with_the_best_first(capfd):
    assert main(["sweep", CONFIG, "optimizer.lr=3e-4,1e-4", "seed=0..1", "steps=12"]) == 0
    out = capfd.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    head = lines.index(["optimizer.lr", "loss", "spread", "seeds"])
    # lr x 1000 + seed / 100 + 6 / 12
    assert lines[head + 1][:4] == ["1e-4", "0.6050", "+-", "0.0071"]
    assert lines[head + 2][:4] == ["3e-4", "0.8050", "+-", "0.0071"]
    assert lines[head + 1][4:] == ["0:", "0.6000", "1:", "0.6100"]
    to_go = re.findall(r"done .* \((\d) to go, about (\d+:\d\d)\)", out)
    assert [count for count, _ in to_go] == ["3", "2", "1"], "the last line has no estimate"
    assert "lowest first; mean and standard deviation over the seeds" in out
    labels = {path.name for path in Path("runs/quick-sweep").iterdir() if path.is_dir()}
    assert labels == {f"lr={lr},seed={seed}" for lr in ("1e-4", "3e-4") for seed in (0, 1)}
    record = json.loads(Path("runs/quick-sweep/sweep.json").read_text())
    assert len(record["members"]) == 4
    assert "steps=12" in record["members"][0]["settings"]
    assert main(lines[-1][lines[-1].index("report") :]) == 0


def test_finished_runs_are_skipped_and_a_larger_grid_runs_the_new_ones(capfd):
    assert main(["sweep", CONFIG, "optimizer.lr=1e-4", "seed=0,1"]) == 0
    assert main(["sweep", CONFIG, "optimizer.lr=1e-4", "seed=0..2", "--json"]) == 0
    found = capfd.readouterr()
    assert "3 runs, 2 of them earlier" in found.err
    assert [tries(f"seed={seed}") for seed in range(3)] == [1, 1, 1]
    (group,) = json.loads(found.out.splitlines()[-1])["groups"]
    assert group["seeds"] == pytest.approx({"0": 0.6, "1": 0.61, "2": 0.62})
    assert (group["mean"], group["spread"]) == pytest.approx((0.61, 0.01))


def test_a_member_that_fails_stops_no_other_and_is_listed_with_its_message(capfd):
    assert main(["sweep", CONFIG, "optimizer.lr=9,7,6,1e-4"]) == 70
    out = capfd.readouterr().out
    assert "failed   lr=9  no step from 1 to 2 was finite" in out
    assert "failed   lr=7  experiments/quick.py: something is wrong with 7" in out
    assert "failed   lr=6  OSError: [Errno 5] Input/output error" in out
    assert stands("lr=1e-4")["status"] == "done"
    assert "1e-4          0.6000" in out
    assert main(["sweep", CONFIG, "optimizer.lr=9,7,6,1e-4"]) == 70
    assert (tries("lr=9"), tries("lr=1e-4")) == (2, 1), "a failed member is retried"


def interrupted(typed: list[str]) -> int:
    """Sweep, and press Ctrl-C once a member waits for it; return the exit code."""

    def interrupt():
        while not Path("waiting").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    asks = threading.Thread(target=interrupt, daemon=True)
    asks.start()
    code = main(typed)
    asks.join(60)
    return code


def test_a_stop_ends_all_with_75_and_the_same_command_resumes(capfd):
    typed = ["sweep", CONFIG, "optimizer.lr=1e-4,8,2e-4"]
    assert interrupted(typed) == 75
    out = capfd.readouterr().out
    assert f"To resume: jtrain sweep {CONFIG} optimizer.lr=1e-4,8,2e-4" in out
    assert "stopped  lr=8" in out
    assert "-        lr=2e-4  not started" in out
    assert not Path("runs/quick-sweep/lr=2e-4").exists()
    Path("go-on").touch()
    assert main(typed) == 0
    assert (tries("lr=1e-4"), tries("lr=8"), tries("lr=2e-4")) == (1, 2, 1)


def test_a_member_that_is_stopped_before_it_begins_has_not_failed(capfd):
    typed = ["sweep", CONFIG, "optimizer.lr=5"]
    assert interrupted(typed) == 75
    out = capfd.readouterr().out
    assert "stopped  all" in out
    assert "failed" not in out
    Path("go-on").touch()
    assert main(typed) == 0


@several
def test_two_at_a_time_overlap_on_cores_of_their_own(capfd, monkeypatch):
    monkeypatch.setenv("MEET", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert main(["sweep", CONFIG, "seed=0..3", "--jobs", "2"]) == 0
    found = [stands(f"seed={seed}") for seed in range(4)]
    first, second = found[:2]
    assert max(first["begun"], second["begun"]) < min(first["ended"], second["ended"])
    assert {tuple(one["cores"]) for one in found} == {tuple(s.cores) for s in split_machine(2)}
    assert not set(first["cores"]) & set(second["cores"])
    assert all("device_count=4" in one["environment"][0] for one in found)
    assert sorted(os.sched_getaffinity(0)) == CORES, "the cores of this process are unchanged"


def test_gpus_are_split_too(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("jtrain.sweep.pool._cores", lambda: list(range(8)))
    first, second = split_machine(2)
    assert first.environment() == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert second.environment() == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert (first.cores, second.cores) == (frozenset(range(4)), frozenset(range(4, 8)))
    assert main(["sweep", CONFIG, "seed=0,1", "--jobs", "5"]) == 2


REFUSED = [
    (["optimizer.lrr=1e-4,3e-4"], "optimizer.lrr=1e-4: is not a key of optimizer; it has"),
    (["seed=0,-1"], "seed=-1: must be a whole number"),
    (["batch=16,15", "microbatches=2"], "15 rows do not divide into 2 microbatches"),
    (["optimizer.lr=1e-5..1e-2"], "or search the range by Optuna"),
]  # fmt: skip


def test_an_error_is_reported_before_any_member_starts(capfd):
    for typed, told in REFUSED:
        assert main(["sweep", CONFIG, *typed]) == 2
        assert told in capfd.readouterr().err
        assert not Path("runs").exists()


def test_one_name_is_swept_once_at_a_time(capfd):
    with pool.lock_sweep("quick-sweep"):
        assert main(["sweep", CONFIG, "seed=0,1"]) == 2
    assert capfd.readouterr().err.count("is running") == 1
    assert main(["sweep", CONFIG, "seed=0"]) == 0


@pytest.mark.slow
def test_real_runs_side_by_side_have_the_bits_of_single_runs():
    jobs = "2" if len(CORES) > 1 else "1"
    typed = lambda *words: run_python("-m", "jtrain", *words, env=os.environ).stdout
    grid = "optimizer.lr=1e-2,3e-2", "seed=0,1"
    found = json.loads(typed("sweep", CONFIG, *grid, "--jobs", jobs, "--json"))
    assert [len(group["seeds"]) for group in found["groups"]] == [2, 2]
    typed("run", CONFIG, "optimizer.lr=3e-2", "seed=1", "name=one")
    alone = Path("runs/one/metrics.jsonl").read_bytes()
    assert alone == Path("runs/quick-sweep/lr=3e-2,seed=1/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_the_search_of_the_page_runs_and_continues():
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = program.replace('["jtrain", "run", "configs/shakespeare.yaml"', f"[*{PRETEND!r}")
    studies = []
    for trials in (3, 6):
        namespace: dict = {}
        exec(program.replace("TRIALS, RUNS = 20", f"TRIALS, RUNS = {trials}"), namespace)
        studies.append(namespace["study"].trials)
    assert [len(found) for found in studies] == [3, 6]
    for trial in studies[1]:
        assert 1e-5 <= (rate := trial.params["optimizer.lr"]) <= 1e-2
        assert trial.value == pytest.approx(rate * 1000 + 0.5)  # as pretended.py computes it
    assert tries("trial-0000", "search") == 1
