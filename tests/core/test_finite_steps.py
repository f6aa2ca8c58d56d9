"""Nothing that is not finite enters a state, wherever it comes from and however it is laid out."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import by_name

from chaos.numbers import PLACES, Fault, config
from jtrain.config.guard import RollbackPolicy
from jtrain.config.precision import F16
from jtrain.core.pytree import named_leaves
from jtrain.parallel import FSDP, Mirrored, Single
from jtrain.train.setup import set_up

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {"parallel": Single()},
    "one device, microbatches, float16": {
        "parallel": Single(),
        "microbatches": 2,
        "precision": F16(initial=4.0),
    },
    "fsdp": {"parallel": FSDP(devices=8, min_size=0)},
    "shard_map": {"parallel": Mirrored(devices=8, impl="shard_map"), "microbatches": 2},
    "zero 1": {"parallel": Mirrored(devices=8, zero=1)},
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", by_name(LAYOUTS, ["one device", "fsdp"], pytest.mark.thorough))
def test_fifty_faults_change_no_bit_of_the_state(layout):
    given = faults(50, seed=7)
    parts = set_up(config("guard", given, steps_per_call=1, **layout))
    step, state = parts.compile_step(), parts.fresh()
    for number in range(100):
        before, scale = bits(state), float(getattr(state.scale, "factor", 1))
        state, metrics = step(state, parts.place(parts.train[number]))
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
    assert any("average" in name for name in bits(parts.fresh()))
