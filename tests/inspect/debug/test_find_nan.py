"""The origin of the first nonfinite value is found: operation, line, leaf and rows."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from quick_study import config_of, rewrite, trained

from jtrain.inspect.debug.find_nan import NonfiniteReport, find_nan
from jtrain.inspect.debug.nonfinite import NonfiniteTrace

RETURN = 'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])'
LOG = """logits = x @ params["down"]
            likely = jax.nn.relu(logits - jnp.float32(2))
            surprise = jnp.log(likely)
            return jt.Mean.of(surprise.sum(-1), batch["mask"])"""
ROOT = """logits = x @ params["down"]
            far = batch["x"][:, 0] > 0
            root = jnp.where(far, jnp.sqrt(0 * logits[:, 0]), 0)
            return jt.Mean.of(root + logits[:, 1] ** 2, batch["mask"])"""


CONFIG = "configs/quick.yaml"


def found() -> NonfiniteReport:
    said: list[str] = []
    got = find_nan(config_of(CONFIG), log=said.append)
    assert got is not None, said
    return got


def line_of(words: str) -> int:
    lines = Path("experiments/quick.py").read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if words in line)


@pytest.mark.thorough
def test_a_nonfinite_row_of_the_data_is_found(study_home):
    rewrite("    return Arrays(x=", "    corner[7, 1] = np.nan\n    return Arrays(x=")
    got = found()
    batch = config_of(CONFIG).build(None).train[got.step - 1]
    (bad,) = np.flatnonzero(~np.isfinite(batch["x"]).all(-1)).tolist()
    assert got.rows == [bad]
    (origin,) = got.origins
    assert origin.leaf == "x"
    assert origin.what == f"row {bad} of `x` in the batch is nan at [1]"
    assert math.isnan(got.loss)
    assert (got.leaf, got.leaves, got.of_leaves) == ("down", 3, 3)
    earlier = [config_of(CONFIG).build(None).train[i]["x"] for i in range(got.step - 1)]
    assert all(np.isfinite(x).all() for x in earlier), "the first such step is found"


@pytest.mark.thorough
def test_a_log_of_zero_in_the_loss_is_found(study_home):
    rewrite(RETURN, LOG)
    got = found()
    assert (got.step, got.loss) == (1, -math.inf)
    (origin,) = got.origins
    assert origin.primitive == "log"
    assert origin.what == "log(0) = -inf"
    (line,) = origin.lines
    assert (Path(line.file).name, line.line) == ("quick.py", line_of("surprise = jnp.log"))
    assert "surprise = jnp.log(likely)" in got.describe()


@pytest.mark.thorough
def test_a_nonfinite_gradient_behind_a_where_is_found(study_home):
    rewrite(RETURN, ROOT)
    got = found()
    assert math.isfinite(got.loss)
    first, second = got.origins
    assert first.what in {"div(0.5, 0) = inf", "div(0.5, -0) = -inf"}
    assert second.what in {"mul(0, inf) = nan", "mul(0, -inf) = nan"}
    assert {line.line for line in first.lines} == {line_of("jnp.sqrt")}
    assert got.leaf == "down"
    x = config_of("configs/quick.yaml").build(None).train[0]["x"]
    assert len(got.rows) == len(x), "0 x inf is NaN in the branch that is not taken too"
    assert "its gradient is not" in got.describe()


@pytest.mark.slow
def test_resumes_from_the_checkpoint_before_it_and_writes_nothing(study_home):
    rewrite(
        "    return Arrays(x=",
        "    corner[np.argsort(draw.random(rows))[:1], 1] = np.nan\n    return Arrays(x=",
    )
    outcome = trained(CONFIG, "steps=40", "guard.kind=stop")
    bad = [s for s in range(40) if np.isnan(config_of(CONFIG).build(None).train[s]["x"]).any()]
    assert outcome.status == "failed"
    assert f"In the batch of step {bad[0] + 1}, row" in outcome.why
    before = {p: p.stat().st_mtime_ns for p in outcome.directory.path.rglob("*")}
    said: list[str] = []
    got = find_nan(config_of(CONFIG, ["steps=40"]), log=said.append)
    assert got is not None
    assert got.step == bad[0] + 1
    kept = [line for line in said if line.startswith("from checkpoint")]
    steps = [int(p.name) for p in outcome.directory.checkpoints.iterdir() if p.name.isdigit()]
    newest = max(step for step in steps if step <= bad[0])
    assert kept == [f"from checkpoint {newest} of runs/quick"]
    assert {p: p.stat().st_mtime_ns for p in outcome.directory.path.rglob("*")} == before


# The execution that it stands on.


def everything(p, x, key):
    """Use each kind of equation that contains a program."""

    @jax.checkpoint
    def body(carry, z):
        return carry + jnp.tanh(z), z * carry

    carry, ys = jax.lax.scan(body, 0.0, x, reverse=True)
    carry = jax.lax.cond(carry > 0, lambda c: c * 2, lambda c: c, carry)
    carry += jax.lax.fori_loop(0, 3, lambda i, s: s + jax.nn.relu(p) * i, 1.0)
    once_more = lambda s: (s[0] + 1, jnp.sin(s[1]))
    carry += jax.lax.stop_gradient(jax.lax.while_loop(lambda s: s[0] < 3, once_more, (0, carry)))[1]
    drawn = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(3))
    return carry + jax.nn.logsumexp(ys * p) + drawn.sum() * p


@pytest.mark.thorough
def test_execution_by_primitives_equals_the_compiled_program():
    args = 2.0, jnp.array([1.0, 0.0, 2.0]), jax.random.key(1)
    slope = jax.value_and_grad(everything)
    trace = NonfiniteTrace(jax.make_jaxpr(slope)(*args), args)
    assert_close([value.array for value in trace.outputs], slope(*args), 1e-6)


def blamed(fn, *args) -> list:
    blame = NonfiniteTrace(jax.make_jaxpr(fn)(*args), args)
    return blame.origins(blame.outputs[0])


def test_the_unselected_branch_of_a_where_is_no_origin():
    def fn(p, x):
        lost = jnp.where(x > 0.5, x * p, jnp.log(x * 0))
        return lost.sum() + jnp.exp(x * p * 100).sum()

    (origin,) = blamed(fn, 2.0, jnp.float32([1, 2]))
    assert origin.what == "exp(200) = inf"


def test_the_turn_of_a_loop_is_reported():
    fn = lambda x: jax.lax.scan(lambda c, _: (c * c, None), x, None, length=8)[0]
    (origin,) = blamed(fn, jnp.float32(1e5))
    assert origin.turn == (2,)  # 1e10, 1e20, overflow
    assert origin.what == "mul(1e+20, 1e+20) = inf"
