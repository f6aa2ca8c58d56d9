"""Over a whole data set each row counts once, in its order, however it is split."""

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.data import Arrays, InOrder
from jtrain.errors import ConfigError, LossError
from jtrain.parallel import Mirrored

X = np.random.default_rng(0).normal(size=(45, 3)).astype(np.float32)
W = {"w": np.float32([1, -2, 3]), "offset": 0.5}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp()))


def apply(params, batch):
    height = batch["x"] @ params["w"] + params["offset"]
    return {"height": height, "square": batch["x"] ** 2}


@pytest.mark.parametrize("parallel", ["mirrored", "fsdp", "single"])
def test_rows_come_in_the_order_of_the_data(parallel):
    found = jt.predict(apply, W, X, batch=16, parallel=parallel)  # 45 rows: the last are 13
    np.testing.assert_allclose(found["height"], X @ W["w"] + 0.5, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["square"], X**2, rtol=1e-6)
    assert isinstance(found["height"], np.ndarray)


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


def test_says_what_gives_no_row_for_each_row():
    with pytest.raises(LossError, match=r"as mean for 128 rows has shape \[\]"):
        jt.predict(lambda p, b: {"mean": jnp.mean(b["x"])}, W, X)
    with pytest.raises(LossError, match="returned no array"):
        jt.predict(lambda p, b: {}, W, X)
    with pytest.raises(ConfigError, match="set impl=jit"):
        jt.predict(apply, W, X, parallel=Mirrored(impl="shard_map"))
    with pytest.raises(ConfigError, match="12 rows do not divide into 8 devices"):
        jt.predict(apply, W, X, batch=12)
