"""Nothing that is not finite enters a state, and a smaller loss scale mends an overflow."""

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import by_name

import jtrain as jt
from chaos.numbers import PLACES, Fault, config
from jtrain.config.precision import F16
from jtrain.config.sections import RollbackPolicy
from jtrain.core.pytree import named_leaves
from jtrain.data import Arrays, Shuffled
from jtrain.parallel import FSDP, Mirrored, Single
from jtrain.train.program import set_up

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"parallel": Single()},
    "one device, microbatches, float16": {
        "parallel": Single(),
        "microbatches": 2,
        "precision": F16(initial=4.0),
    },
    "fsdp": {"parallel": FSDP(devices=8, min_size=0)},
    "shard_map": {"parallel": Mirrored(devices=8, impl="shard_map"), "microbatches": 2},
    "pmap": {"parallel": Mirrored(devices=8, impl="pmap")},
}


def faults(count: int, seed: int) -> tuple[Fault, ...]:
    """One in every second batch, at each place at least once."""
    draw = random.Random(seed)
    places = [PLACES[n % len(PLACES)] for n in range(count)]
    draw.shuffle(places)
    return tuple(
        Fault(
            batch=2 * number,
            place=place,
            value=draw.choice(("nan", "inf", "-inf")),
            row=draw.randrange(16),
        )
        for number, place in enumerate(places)
    )


def bits(state) -> dict[str, Any]:
    """All leaves but the counts and the loss scale, as bytes."""
    found = named_leaves(jax.device_get(state))
    apart = {"step", "skipped", "scale/factor", "scale/good"}
    return {name: leaf.tobytes() for name, leaf in found.items() if name not in apart}


@pytest.mark.parametrize("layout", by_name(LAYOUTS, ["one device"], pytest.mark.thorough))
def test_a_fault_at_any_place_changes_no_bit_of_the_state(layout):
    given = faults(2 * len(PLACES), seed=7)
    parts = set_up(config("guard", given, steps_per_call=1, **layout))
    step, state = parts.compile_step(), parts.initial_state()
    for number in range(2 * len(given)):
        before, scale = bits(state), float(getattr(state.scale, "factor", 1))
        state, metrics = step(state, parts.place(parts.batches().train[number]))
        broken = number % 2 == 0
        what = given[number // 2] if broken else "a clean batch"
        same = {name for name, found in bits(state).items() if found == before[name]}
        moved = set(before) - same
        assert not moved if broken else moved > {"params/up", "extra/mean"}, what
        assert same if broken else "extra/still" in same, what
        assert int(state.skipped) == number // 2 + 1
        if scale > 1:
            overflow = broken and what.place.startswith("gradient")  # of the rest no scale is why
            assert float(state.scale.factor) == (scale / 2 if overflow else scale)
        if broken:
            numbers = [metrics[name].value() for name in ("loss", "grad_norm")]
            extra = what.place == "total of a change of extra"
            assert np.isfinite(numbers).all() == extra, what
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]
    assert all(map(bool, finite))


def test_the_average_of_the_parameters_is_among_what_stays():
    parts = set_up(config("guard", guard=RollbackPolicy()))
    assert any("average" in name for name in bits(parts.initial_state()))


ROWS, BATCH, BAD = 64, 16, 37
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)).astype(np.float32)
Y = X @ np.float32([1, 2, 3])
USE = np.ones(ROWS, bool)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)


def with_bad(array, value):
    bad = np.array(array)
    bad[BAD] = value
    return bad


def loss(params, batch, rng):
    """Squared error of a line in the type of its parameters, where `use` holds."""
    del rng
    guess = batch["x"].astype(params["w"].dtype) @ params["w"]
    error = jnp.where(batch["use"], guess.astype(jnp.float32) - batch["y"], 0)
    return jt.Mean.of(jnp.square(error) * batch["size"], batch["mask"])


CLEAN: dict[str, Any] = {"x": X, "y": Y, "use": USE, "size": np.ones(ROWS, np.float32)}
NOT_USED = with_bad(USE, False)
UNHURT: dict[str, dict[str, Any]] = {
    "clean": {},
    "a masked NaN that reaches nothing": {"y": with_bad(Y, np.nan), "use": NOT_USED},
    # The slope of a row is 2 x error x 2,000 / 16: times 2^12 it is beyond 65,504.
    "an overflow": {"size": with_bad(CLEAN["size"], 2000.0)},
    # Its loss is hidden, and its gradient is NaN times 0: it is skipped as an overflow is.
    "a masked NaN that reaches the gradient": {"x": with_bad(X, np.nan), "use": NOT_USED},
}


@pytest.mark.thorough
@pytest.mark.parametrize("changes", by_name(UNHURT, ("an overflow",), pytest.mark.thorough))
def test_nothing_is_done_about_a_gradient_alone_above_the_smallest_scale(changes):
    data = Shuffled(Arrays(**(CLEAN | changes)), size=BATCH, seed=1)
    call = {"steps": 8, "precision": F16(initial=2.0**12), "guard": "stop", "quiet": True}
    start = {"w": np.zeros(3, np.float32)}
    result = jt.fit(
        loss, start, data, "sgd", lr=0.01, parallel="single", name="run", checkpoint_every=2, **call
    )
    assert result.step == 8
    assert not Path("runs/run/events.jsonl").exists()
    overflows = int(result.state.skipped)
    assert overflows == (2 if {"size", "x"} & changes.keys() else 0)
    assert float(result.state.scale.factor) == 2.0 ** (12 - overflows)
