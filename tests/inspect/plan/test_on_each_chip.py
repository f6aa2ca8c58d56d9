"""Plans for each kind of TPU by the newest compiler: memory and collectives, counted by hand.

The tests need libtpu, `pip install 'jtrain[plan]'`, and no TPU: `pytest -m compiler`.
"""

import pytest
from tpu_programs import BF16, F32, ROWS, TIME, VOCAB, near, planned, sent

from jtrain.inspect.plan.plan import Plan
from jtrain.parallel.chips import CHIPS

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("from_the_top")]

LAYERS, WIDTH, HIDDEN = 2, 256, 1024
SMALL = (
    f"model.layers={LAYERS}",
    "model.heads=2",
    f"model.width={WIDTH}",
    f"model.hidden={HIDDEN}",
    "parallel.kind=fsdp",
    "parallel.min_size=0",
)
BLOCKS = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)  # elements
TABLES = 2 * VOCAB * WIDTH
ACTIVATION = ROWS * TIME * WIDTH * BF16
# A slice of each kind, and its devices: a chip of v2, v3 and tpu7x is two of them.
SLICES = {
    "v2:2x2": 8,
    "v3:2x2": 8,
    "v4:2x2x1": 4,
    "v5e:2x2": 4,
    "v5p:2x2x2": 8,
    "v6e:2x4": 8,
    "tpu7x:2x2x1": 8,
}


def test_every_kind_is_among_them():
    assert {where.partition(":")[0] for where in SLICES} == set(CHIPS)


@pytest.mark.parametrize(("where", "devices"), SLICES.items(), ids=list(SLICES))
def test_a_step_is_planned_for_it(where, devices):
    found = planned(where, *SMALL)
    assert found.devices == devices
    assert found.unread == ()
    assert found.memory["limit"] == int(CHIPS[where.partition(":")[0]].gib * 2**30)
    state = 3 * (BLOCKS + TABLES) * F32 / devices
    assert near(found.leaves, state, 0.02)  # and the scales of norms
    assert near(found.memory["arguments"], state, 0.1)
    assert 0 < found.memory["temporaries"] < 20 * state + 20 * ACTIVATION
    check_traffic(found, (devices - 1) / devices)


def check_traffic(found: Plan, others: float) -> None:
    """Expect two gathers of the weights, one scatter of the gradients, and nothing else.

    Args:
        others: the fraction of an array that a device does not have.
    """
    crossing = sent(found, "fsdp")
    weights = (2 * BLOCKS + VOCAB * WIDTH) * BF16 * others  # the head once
    gradients = (BLOCKS * BF16 + VOCAB * WIDTH * F32) * others
    # Older chips reduce gradients and keep a part: twice what a scatter sends.
    scattered = crossing.get("reduce-scatter", 0) + crossing.get("all-reduce", 0) / 2
    assert near(crossing["all-gather"], weights, 0.1)
    assert near(scattered, gradients, 0.15)
    looked_up = crossing.get("all-to-all", 0) + crossing.get("collective-permute", 0)
    assert looked_up < 4 * ACTIVATION
