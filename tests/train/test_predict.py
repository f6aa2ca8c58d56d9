"""Each row of a data set counts once, in its order, under any layout, on the available devices."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from plain_environ import run_python
from predicting_process import W, X, apply
from quick_study import config_of, trained
from two_processes import in_two_processes

import jtrain as jt
from jtrain.errors import ConfigError, LossError
from jtrain.parallel import FSDP, Mirrored, Single
from jtrain.train.restore import fit_layout_to_devices

SCRIPT = Path(__file__).with_name("predicting_process.py")
pytestmark = pytest.mark.usefixtures("here")
PATIENCE = 240  # seconds; alone on two cores it takes about 10


@pytest.mark.parametrize("parallel", ["mirrored", "single"])
def test_rows_come_in_the_order_of_the_data(parallel):
    found = jt.predict(apply, W, X, batch=16, parallel=parallel)  # 45 rows: the last are 13
    assert_close(found["height"], X @ W["w"] + 0.5, 1e-6)
    assert_close(found["square"], X**2, 1e-6)
    assert isinstance(found["height"], np.ndarray)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Return the result of each of two processes."""
    folder = tmp_path_factory.mktemp("predicting")
    files = [folder / f"{index}.npz" for index in range(2)]
    words = lambda port, index: (port, str(index), files[index])
    in_two_processes(SCRIPT, words, patience=PATIENCE)
    return [dict(np.load(file)) for file in files]


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", ["mirrored", "fsdp"])
def test_each_of_two_processes_gets_all_rows_in_order(two, parallel):
    for found in two:
        assert_close(found[f"{parallel}/height"], X @ W["w"] + 0.5, 1e-6)
        assert_close(found[f"{parallel}/square"], X**2, 1e-6)
        rows = [*range(16), *range(16), *range(13)]
        assert found[f"{parallel}/row"].tolist() == rows, "the row is that of the global batch"
        loss = np.mean((X @ W["w"] + 0.5).astype(np.float64) ** 2)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.thorough
def test_both_processes_refuse_a_label_that_one_of_them_reads(two):
    for found in two:
        assert "row 13 of the first batch holds 7." in str(found["counted"])
        assert str(found["left_out"]) == ""


@pytest.mark.thorough
def test_a_hook_of_one_process_ends_the_calls_of_both(two):
    assert [found["hooked"].tolist() for found in two] == [[7, 14, 21], []]


@pytest.mark.thorough
def test_evaluate_is_the_mean_over_all_rows():
    def loss(params, batch, rng):
        assert rng is None
        found = apply(params, batch)["height"]
        return jt.Mean.of(found**2, batch["mask"]), {"size": jt.Mean.of(abs(found), batch["mask"])}

    height = (X @ W["w"] + 0.5).astype(np.float64)
    for batch in (8, 64):
        found = jt.evaluate(loss, W, X, batch=batch)
        expected = {"loss": (height**2).mean(), "size": abs(height).mean(), "rows": 45}
        assert found == pytest.approx(expected, rel=1e-5)


def test_refuses_outputs_without_a_row_for_each_row():
    with pytest.raises(LossError, match=r"under mean for 128 rows has shape \[\]"):
        jt.predict(lambda p, b: {"mean": jnp.mean(b["x"])}, W, X)
    with pytest.raises(LossError, match="returned no array"):
        jt.predict(lambda p, b: {}, W, X)
    with pytest.raises(ConfigError, match="set impl=jit"):
        jt.predict(apply, W, X, parallel=Mirrored(impl="shard_map"))


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_run_that_was_trained_on_eight_is_measured_on_one():
    split = "parallel={kind: sharded, data: 2, fsdp: 4, min_size: 0}"
    outcome = trained("configs/quick.yaml", split, "steps=4")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = run_python("-m", "jtrain", "eval", "quick", "--json", env=env)
    assert json.loads(done.stdout)["valid"] == pytest.approx(dict(outcome.results[4]), rel=1e-6)
    assert done.stderr.splitlines()[-1] == (
        "runs/quick: trained under parallel.kind=sharded, which does not fit the 1 device here: "
        "used as single over 1"
    )


@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize(
    ("parallel", "batch", "layout"),
    [
        ("{kind: sharded, fsdp: 2, tensor: 2}", 16, FSDP(devices=8)),
        ("{kind: mirrored, devices: 16}", 16, Mirrored(devices=8)),
        ("{kind: fsdp, devices: 16}", 12, FSDP(devices=6)),
        ("{kind: sharded, fsdp: 3}", 1, Single()),
        ("{kind: mirrored, devices: 4}", 16, Mirrored(devices=4)),  # which fits
    ],
)
def test_as_many_devices_as_divide_the_rows(parallel: str, batch: int, layout):
    stored = config_of("configs/quick.yaml", [f"parallel={parallel}", f"batch={batch}"])
    config, line = fit_layout_to_devices(stored, stored)
    assert config.parallel == layout
    kept = layout == stored.parallel
    assert line.endswith("" if kept else f"used as {layout.kind} over {layout.devices or 1}")
    assert (line == "") == (config == stored) == kept
