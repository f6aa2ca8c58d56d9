"""`parallel.devices` splits a CPU in a process of its own, where no variable sets the devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_study import write_study

FIT = """
import jax, numpy as np, jtrain as jt
loss = lambda params, batch, rng: jt.Mean.of((batch["x"] @ params) ** 2, batch["mask"])
data = {"x": np.ones((8, 2), np.float32)}
jt.fit(loss, np.ones(2, np.float32), data, steps=2, batch=4, devices=2, quiet=True)
print(jax.device_count(), "devices")
"""


SHORT = ["steps=1", "batch=4", "evaluate.every=0", "name=split"]


def child(words: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing says how many devices a CPU has."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    env = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("settings", "banner"),
    [
        (["parallel.kind=fsdp", "parallel.devices=2"], "fsdp over 2 cpu devices"),
        (["parallel.kind=single", "parallel.devices=[1]"], "single over 1 cpu device"),
    ],
)
def test_a_run_splits_the_cpu_into_the_devices_it_asks_for(settings, banner, tmp_path: Path):
    path = write_study(tmp_path)
    done = child(["-m", "jtrain", "run", str(path), *SHORT, *settings], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert banner in done.stdout


def test_fit_splits_the_cpu_into_the_devices_it_asks_for(tmp_path: Path):
    done = child(["-c", FIT], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["2", "devices"]


@pytest.mark.thorough
def test_each_launched_process_has_the_devices_of_the_config(tmp_path: Path):
    launch = ["-m", "jtrain", "launch", "--processes", "2"]
    run = [
        "run",
        str(write_study(tmp_path)),
        *SHORT,
        "parallel.kind=mirrored",
        "parallel.devices=2",
    ]
    done = child([*launch, *run], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mirrored over 4 cpu devices" in done.stdout
    fewer = child([*launch, "--devices", "1", *run, "name=fewer"], tmp_path)
    assert fewer.returncode == 2
    assert "set JAX_NUM_CPU_DEVICES=2 in place of 1: jtrain launch does so with --devices 2" in (
        fewer.stdout + fewer.stderr
    )
