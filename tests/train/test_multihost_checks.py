"""Processes that differ are named with the difference; so is one that never joins."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from quick_study import at_home, config_of, write_study

import jtrain.train.multihost_checks
from jtrain.checkpoint import layout
from jtrain.cli import main
from jtrain.distributed.launcher.launch import worker_environment
from jtrain.distributed.launcher.port import free_port
from jtrain.errors import ConfigError
from jtrain.train.multihost_checks import (
    check_devices,
    check_shared_directory,
    join_run,
    process_facts,
)
from jtrain.train.run_dir import RunDir

CONFIG = "configs/quick.yaml"
RUN = Path("runs/quick")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


def known(*settings: str) -> dict[str, str]:
    return process_facts(config_of(CONFIG, settings), RUN)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert len(one) > 300, "every file of the package among them"
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def test_equal_processes_have_equal_facts():
    assert differing(known(), known()) == set()


def test_another_value_is_the_one_that_differs():
    assert differing(known(), known("seed=1", "parallel.kind=mirrored")) >= {
        "config seed",
        "config parallel.kind",
    }
    assert differing(known(), known("seed=1")) == {"config seed"}
    assert known("seed=1")["config seed"] == "1"


def test_another_experiment_is_the_one_that_differs():
    before, file = known(), Path("experiments/quick.py")
    file.write_text(file.read_text() + "# another\n")
    assert differing(before, known()) == {"code quick.py"}


def test_another_package_is_the_one_that_differs(monkeypatch):
    before, version = known(), jtrain.train.multihost_checks.installed_version
    other = lambda name: "0.0.1" if name == "optax" else version(name)
    monkeypatch.setattr(jtrain.train.multihost_checks, "installed_version", other)
    assert differing(before, known()) == {"package optax"}


def test_another_environment_is_the_one_that_differs(monkeypatch):
    before = known()
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")  # changes nothing
    assert differing(before, known()) == {"variable JAX_ENABLE_X64"}


def test_a_run_that_only_one_sees_is_the_one_that_differs():
    before = known()
    (RUN / "checkpoints").mkdir(parents=True)
    layout.commit(layout.create_saving_path(RUN / "checkpoints", 200), {})
    (RUN / "run.json").write_text('{"status": "running"}')
    assert differing(before, known()) == {f"run {RUN}"}
    assert (before[f"run {RUN}"], known()[f"run {RUN}"]) == ("nothing", "running at step 200")


def test_other_devices_are_named(monkeypatch):
    device = lambda process, kind: SimpleNamespace(process_index=process, device_kind=kind)
    same = [device(0, "H100"), device(1, "H100"), device(0, "H100"), device(1, "H100")]
    monkeypatch.setattr(jax, "devices", lambda: same)
    check_devices()
    monkeypatch.setattr(jax, "devices", lambda: [*same, device(2, "A100")])
    with pytest.raises(ConfigError, match=r"process 0 has 2 x H100 and process 2 1 x A100.*CUDA"):
        check_devices()


def test_a_directory_that_is_not_shared_is_named(monkeypatch):
    there = RunDir(RUN)
    check_shared_directory(there)  # one process
    seen = SimpleNamespace(
        sync_global_devices=lambda name: None,
        process_allgather=lambda here: np.array([True, bool(here), True]),
    )
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jtrain.train.multihost_checks, "multihost_utils", seen)
    with pytest.raises(
        ConfigError, match=r"process 1 does not see it\. Run in a file system that all processes"
    ):
        check_shared_directory(there)


def test_an_evaluator_is_told_what_to_type(monkeypatch):
    said = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", said)
    with pytest.raises(ConfigError, match=r"only evaluates.*jtrain eval quick"):
        join_run(config_of(CONFIG), RUN)
    assert join_run(config_of(CONFIG), RUN, trains=False).processes == 1


def test_a_process_that_never_joins_ends_the_run_in_time(monkeypatch, capsys):
    for index, message in (
        (0, "1 of 2 processes reached 127.0.0.1"),
        (1, "tried 0.3 s to reach process 0"),
    ):
        told = worker_environment({}, f"127.0.0.1:{free_port()}", index, 2, 0)
        for name in ("JTRAIN_COORDINATOR", "JTRAIN_PROCESSES", "JTRAIN_PROCESS"):
            monkeypatch.setenv(name, told[name])
        assert main(["run", CONFIG, "parallel.start_timeout=0.3"]) == 70
        said = capsys.readouterr().err
        assert message in said
        assert "JTRAIN_COORDINATOR" in said
        assert "Traceback" not in said
    assert not RUN.exists()


@pytest.mark.thorough
def test_two_seeds_end_both_processes_with_what_differs():
    where = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jtrain", "run", CONFIG, f"seed={index}"),
                "parallel.start_timeout=30",
            ],
            env=worker_environment(os.environ, where, index, 2, 1),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    # A stranger may say anything, so process 0 waits for the one that it misses.
    assert [process.returncode for process in processes] == [70, 2]
    assert all("config seed: 0 in process 0, 1 in process 1" in words for words in said)
    assert not RUN.exists()
