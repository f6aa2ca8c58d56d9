"""A loss whose rows meet is measured with all of them together, or is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.core.evaluate import make_evaluate, rows_are_coupled
from jtrain.data import Arrays, InOrder
from jtrain.errors import LossError
from jtrain.losses.contrastive import contrastive
from jtrain.parallel import FSDP, Mirrored


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


DRAW = np.random.default_rng(0)
ROWS = 64
DATA = {name: DRAW.normal(size=(ROWS, 6)).astype(np.float32) for name in ("left", "right")}
PARAMS = {name: DRAW.normal(size=(6, 8)).astype(np.float32) for name in ("left", "right")}


def towers(params, batch, rng):
    del rng
    left, right = (batch[name] @ params[name] for name in ("left", "right"))
    return contrastive(left, right, jnp.float32(1), batch["mask"])


def in_float64() -> float:
    """The loss over all rows."""
    left, right = (DATA[n].astype(np.float64) @ PARAMS[n] for n in ("left", "right"))
    left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
    like = np.e * left @ right.T
    log_total = lambda axis: np.log(np.exp(like).sum(axis)) - np.diag(like)
    return float((log_total(1) + log_total(0)).mean() / 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"batch": ROWS, "parallel": FSDP(devices=4)},
        {"batch": 72, "parallel": Mirrored(devices=8)},
    ],
    ids=str,
)
def test_all_rows_meet_in_one_batch(how):
    got = jt.evaluate(towers, PARAMS, DATA, rows_interact="batch", **how)
    assert got["loss"] == pytest.approx(in_float64(), rel=1e-5)
    assert got["rows"] == ROWS


@pytest.mark.thorough
def test_what_would_cut_them_is_refused_and_its_advice_works():
    size = 16
    with pytest.raises(LossError, match=rf"batches of {size} would cut the data into") as caught:
        jt.evaluate(towers, PARAMS, DATA, batch=size, rows_interact="batch")
    assert "(batch=64, or data in a single batch)" in str(caught.value)
    apart = jt.evaluate(towers, PARAMS, DATA, batch=size, rows_interact="slice")["loss"]
    parts = [{n: x[i : i + size] for n, x in DATA.items()} for i in range(0, ROWS, size)]
    alone = [jt.evaluate(towers, PARAMS, part, rows_interact="batch")["loss"] for part in parts]
    assert apart == pytest.approx(np.mean(alone), rel=1e-5), "each batch is a group of its own"
    own = InOrder(Arrays(**DATA), size=ROWS)
    assert jt.evaluate(towers, PARAMS, own, rows_interact="batch")["loss"] > apart + 0.5
    with pytest.raises(LossError, match="would cut the data"):
        jt.evaluate(towers, PARAMS, InOrder(Arrays(**DATA), size=size), rows_interact="batch")


@pytest.mark.thorough
def test_copies_are_refused_as_in_training():
    where = Mirrored(impl="shard_map", devices=2)
    with pytest.raises(LossError, match="separate copies of the step would cut the batch"):
        jt.evaluate(towers, PARAMS, DATA, rows_interact="batch", parallel=where)
    with pytest.raises(LossError, match="separate copies of the step would cut the batch"):
        make_evaluate(towers, rows_interact="batch", psum=where.build().psum)
    assert make_evaluate(towers, rows_interact="slice", psum=where.build().psum)
    assert jt.evaluate(towers, PARAMS, DATA, rows_interact="slice", parallel=where)["rows"] == ROWS


def fitted(loss=towers, params=PARAMS, **more):
    call: dict[str, Any] = {"steps": 2, "batch": 32, "rows_interact": "batch", "quiet": True}
    return jt.fit(loss, params, DATA, "sgd", lr=0.1, valid=DATA, **(call | more))


@pytest.mark.thorough
def test_a_run_is_refused_before_it_trains_and_its_advice_works():
    with pytest.raises(LossError, match=r"batches of 32 would cut the 64 rows of `valid` into 2"):
        fitted()
    whole = fitted(valid_batch=64)
    together = jt.evaluate(towers, whole.params, DATA, rows_interact="batch")["loss"]
    assert whole.history["valid/loss"][2] == pytest.approx(together, rel=1e-6)
    assert whole.evaluate(DATA)["loss"] == pytest.approx(together, rel=1e-6)
    with pytest.raises(LossError, match="batches of 16 would cut the data into 4"):
        whole.evaluate(DATA, batch=16)
    groups = fitted(valid_rows_interact="slice")
    apart = jt.evaluate(towers, groups.params, DATA, rows_interact="slice", batch=32)["loss"]
    assert groups.history["valid/loss"][2] == pytest.approx(apart, rel=1e-6)


@pytest.mark.thorough
def test_rows_that_meet_in_training_alone_may_be_in_several_batches():
    @jt.stateful
    def normed(params, extra, batch, rng):
        x = batch["left"]
        mean = extra["mean"] if rng is None else x.mean(0)
        error = (x - mean[None]) @ params["left"][:, 0] - batch["right"][:, 0]
        kept = extra if rng is None else {"mean": jt.Mean(x.sum(0), jnp.float32(len(x)))}
        return jt.Mean.of(jnp.square(error), batch["mask"]), {}, kept

    extra = {"mean": np.zeros(6, np.float32)}
    assert fitted(normed, {"left": PARAMS["left"]}, extra=extra).step == 2


def test_whether_rows_meet_is_seen_from_one_batch():
    batch = {**DATA, "row": np.arange(ROWS, dtype=np.int32), "mask": np.ones(ROWS, bool)}
    apart = lambda params, batch, rng: jt.Mean.of(batch["left"][:, 0], batch["mask"])
    scalar = lambda params, batch, rng: jnp.square(batch["left"]).mean()
    centred = lambda params, batch, rng: jt.Mean.of(
        jnp.square(batch["left"] - batch["left"].mean(0, keepdims=True)).sum(-1), batch["mask"]
    )
    found = {}
    for name, loss in {
        "towers": towers,
        "apart": apart,
        "scalar": scalar,
        "centred": centred,
    }.items():
        program = jax.jit(make_evaluate(loss))
        found[name] = rows_are_coupled(lambda batch, p=program: p((PARAMS, ()), batch), batch)
        odd = {name: array[:63] for name, array in batch.items()}
        assert rows_are_coupled(lambda batch, p=program: p((PARAMS, ()), batch), odd) == found[name]
    assert found == {"towers": True, "apart": False, "scalar": False, "centred": True}
