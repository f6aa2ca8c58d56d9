"""Processes that differ are named with the difference; what one sets before it computes."""

import os
import platform
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from plain_environ import run_python
from quick_study import config_of

import jtrain.train.processes
from jtrain.checkpoint import layout
from jtrain.cli import main
from jtrain.distributed import multihost
from jtrain.distributed.launcher.supervise import worker_environment
from jtrain.distributed.port import free_port
from jtrain.errors import FAULT, ConfigError, DamagedError, UnreachableError
from jtrain.train.processes import check_devices, check_shared_directory, process_facts
from jtrain.train.run_dir import RunDir

CONFIG, RUN = "configs/quick.yaml", Path("runs/quick")
pytestmark = pytest.mark.usefixtures("study_home")


def known(*settings: str) -> dict[str, str]:
    return process_facts(config_of(CONFIG, settings), RUN)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert len(one) > 300, "every file of the package among them"
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def test_what_differs_between_processes_is_named(monkeypatch):
    before, version = known(), jtrain.train.processes.installed_version
    assert differing(before, known()) == set()
    assert differing(before, known("seed=1")) == {"config seed"}
    with monkeypatch.context() as patch:
        other = lambda name: "0.0.1" if name == "optax" else version(name)
        patch.setattr(jtrain.train.processes, "installed_version", other)
        assert differing(before, known()) == {"package optax"}
    with monkeypatch.context() as patch:
        patch.setenv("JAX_ENABLE_X64", "1")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")  # changes nothing
        assert differing(before, known()) == {"variable JAX_ENABLE_X64"}
    (RUN / "checkpoints").mkdir(parents=True)
    layout.commit(layout.create_saving_path(RUN / "checkpoints", 200), {})
    (RUN / "run.json").write_text('{"status": "running"}')
    seen = known()
    assert differing(before, seen) == {f"run {RUN}"}
    assert (before[f"run {RUN}"], seen[f"run {RUN}"]) == ("nothing", "running at step 200")
    file = Path("experiments/quick.py")
    file.write_text(file.read_text() + "# another\n")
    assert differing(seen, known()) == {"code quick.py"}


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
    monkeypatch.setattr(jtrain.train.processes, "all_gather", lambda here: [True, here, True])
    with pytest.raises(ConfigError, match=r"process 1 does not see it\. Run in a file system that"):
        check_shared_directory(there)


def test_an_error_of_the_first_process_is_raised_in_all(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost, "barrier", lambda: None)
    monkeypatch.setattr(multihost, "all_gather", lambda value: sent.append(value) or sent[:1])

    def make():
        raise DamagedError("checkpoint 4 is damaged")

    for index, kind in enumerate((DamagedError, UnreachableError)):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        with pytest.raises(kind, match="checkpoint 4 is damaged") as told:
            multihost.broadcast_from_first(make)
        assert told.value.code == FAULT


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


SHORT = ["steps=1", "batch=4", "evaluate.every=0", "name=split"]


@pytest.mark.thorough
def test_a_run_splits_the_cpu_into_the_devices_it_asks_for(tmp_path: Path):
    settings = ["parallel.kind=fsdp", "parallel.devices=2"]
    done = run_python("-m", "jtrain", "run", CONFIG, *SHORT, *settings, cwd=tmp_path)
    assert "fsdp over 2 cpu devices" in done.stdout


FAULTS = """
import resource
import numpy as np
from jtrain.train.runtime import reuse_memory

reuses = reuse_memory()
np.ones(100 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(100 << 20, np.uint8)
print(int(reuses), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 >> 20)
"""

UNSET = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_an_allocation_of_100_mb_faults_once():
    done = run_python("-c", FAULTS, env={**UNSET, "JAX_PLATFORMS": "cpu"})
    found, megabytes = map(int, done.stdout.split())
    assert found == 1, "it is reused"
    # Huge pages, where the system gives them, fault less often: only the upper bound is sure.
    assert megabytes < 10
