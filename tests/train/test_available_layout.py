"""A trained run is used on the available devices, whatever it was trained on."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from quick_study import at_home, config_of, trained, write_study

from jtrain.parallel import FSDP, Axes, Mirrored, Single
from jtrain.train.restore_run import fit_layout_to_devices
from jtrain.train.run_result import RunResult

SPLIT = "parallel={kind: sharded, data: 2, fsdp: 4, min_size: 0}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("used")


@pytest.fixture(scope="module")
def outcome(place: Path) -> RunResult:
    """Train a run over eight devices."""
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        return trained(write_study(place), SPLIT, "steps=4")


@pytest.fixture(autouse=True)
def _home(place: Path, outcome: RunResult, monkeypatch: pytest.MonkeyPatch):
    at_home(place, monkeypatch, place / "compiled")


def on(devices: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a number of devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-m", "jtrain", *words],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.thorough
def test_a_run_that_was_trained_on_eight_is_measured_on_one(outcome: RunResult):
    done = on(1, "eval", "quick", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["valid"] == pytest.approx(dict(outcome.results[4]), rel=1e-6)
    assert done.stderr.splitlines()[-1] == (
        "runs/quick: trained under parallel.kind=sharded, which does not fit the 1 device here: "
        "used as single over 1"
    )


@pytest.mark.slow
def test_training_says_what_fits_one_device_and_that_works():
    refused = on(1, "run", "runs/quick/config.yaml", "steps=6")
    assert refused.returncode == 2
    assert "data 2 x fsdp 4 = 8 shards, and there is 1 device. Nearest: " in refused.stderr
    advised = refused.stderr.rpartition("Nearest: ")[2].rstrip().removesuffix(".")
    words = ["--fast", *shlex.split(advised)]
    done = on(1, "run", "runs/quick/config.yaml", "steps=6", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_the_banner_and_run_json_say_devices_and_shards(outcome: RunResult):
    log = outcome.directory.log.read_text()
    assert "sharded over 8 cpu devices (data 2 x fsdp 4), 16 rows a step in 8 shards, 1 mic" in log
    said = json.loads(outcome.directory.status.read_text())
    assert (len(said["devices"]), said["shards"]) == (8, 8)
    assert said["layout"] == {"data": 2, "fsdp": 4}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallel", "batch", "layout"),
    [
        ("{kind: sharded, fsdp: 16}", 16, FSDP(devices=8)),
        ("{kind: sharded, fsdp: 2, tensor: 2}", 16, FSDP(devices=8)),
        ("{kind: mirrored, devices: 16}", 16, Mirrored(devices=8)),
        ("{kind: mirrored, devices: 16, zero: 3}", 16, FSDP(devices=8)),
        ("{kind: fsdp, devices: 16}", 12, FSDP(devices=6)),
        ("{kind: fsdp}", 7, FSDP(devices=7)),
        ("{kind: sharded, fsdp: 3}", 11, Single()),
        ("{kind: sharded, fsdp: 3}", 1, Single()),
    ],
)
def test_as_many_devices_as_divide_the_rows(parallel: str, batch: int, layout):
    stored = config_of("configs/quick.yaml", [f"parallel={parallel}", f"batch={batch}"])
    config, line = fit_layout_to_devices(stored, stored)
    assert config.parallel == layout
    assert line.endswith(f"used as {layout.kind} over {layout.devices or 1}")


@pytest.mark.parametrize("parallel", ["{kind: single}", "{kind: mirrored, devices: 4}"])
def test_a_layout_that_fits_is_kept(parallel: str):
    stored = config_of("configs/quick.yaml", [f"parallel={parallel}"])
    assert fit_layout_to_devices(stored, stored) == (stored, "")


def test_a_layout_that_is_asked_for_is_taken_as_it_is():
    stored = config_of("configs/quick.yaml", ["parallel={kind: sharded, fsdp: 16}"])
    asked = config_of("configs/quick.yaml", ["parallel={kind: sharded, fsdp: 3}"])
    assert fit_layout_to_devices(asked, stored)[0].parallel == Axes(fsdp=3)
