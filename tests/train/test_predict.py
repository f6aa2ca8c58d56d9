"""Each row of a data set counts once, in its order, under any layout."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from predicting_process import W, X, apply
from two_processes import in_two_processes

import jtrain as jt
from jtrain.data import Arrays, InOrder
from jtrain.errors import ConfigError, LossError
from jtrain.parallel import Mirrored

SCRIPT = Path(__file__).with_name("predicting_process.py")
PATIENCE = 240  # seconds; alone on two cores it takes about 10


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("parallel", ["mirrored", "fsdp", "single"])
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
def test_two_processes_count_a_time_by_the_first_ones_clock(two):
    first, second = (int(found["steps"]) for found in two)
    assert first == second >= 1


def test_takes_more_batches_than_are_in_flight_and_batches_of_the_caller():
    found = jt.predict(lambda p, b: b["x"][:, 0] * p, 2.0, InOrder(Arrays(x=X), size=8))
    np.testing.assert_array_equal(found, X[:, 0] * 2)
    many = np.arange(800, dtype=np.int32)
    np.testing.assert_array_equal(jt.predict(lambda p, b: b["x"], (), many, batch=8), many)


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
    with pytest.raises(ConfigError, match="12 rows do not divide into 8 devices"):
        jt.predict(apply, W, X, batch=12)
