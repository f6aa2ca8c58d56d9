"""What every strategy must do: take the steps that one device takes. A new one is a new row.

By default each strategy on one split; the whole matrix runs under `-m slow`, and
benchmarks/exactness.py makes a table of what it records.
"""

import itertools

import numpy as np
import pytest
from comparison import bitwise, distance
from layouts import STRATEGIES, Case, Walker, reference, walker
from tiny_language import DATA

COLUMNS = (STRATEGIES, [1, 2, 4, 8], [1, 2, 4], DATA, [False, True])
MATRIX = [
    Case(*values)
    for values in itertools.product(*COLUMNS)
    if values[0] != "single" or (values[1] == 1 and values[2] > 1)
]
# Each strategy on one split; rows weigh differently, and some are hidden.
EACH = [
    Case("single", 1, 2, "terms", True),
    Case("mirrored jit", 4, 4, "weighted", True),
    Case("mirrored shard_map", 2, 2, "terms", True),
    Case("mirrored pmap", 4, 1, "weighted", True),
    Case("fsdp", 8, 2, "terms", True),
]
# Adding 32 x 8 numbers in another order moves the last of float32's 24 bits (6e-8) a few times.
ONE_STEP = 1e-6
HUNDRED_STEPS = 1e-4  # in which that grows with the curvature


@pytest.mark.parametrize("case", EACH, ids=str)
def test_takes_the_step_of_one_device_and_repeats_it_bit_for_bit(case):
    here = walker(case)
    got, want = here.walk(2), reference(case, "sgd", 2)
    assert relative(got.losses, want.losses) <= ONE_STEP
    assert distance(got.gradient, want.gradient) <= ONE_STEP
    assert distance(got.params, want.params) <= ONE_STEP
    assert bitwise(here.walk(2), got)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "optimizer"), [(EACH[1], "sgd"), (EACH[4], "adamw")], ids=str)
def test_is_with_one_device_after_a_hundred_steps(case, optimizer):
    assert max(hundred_steps(case, optimizer).values()) <= HUNDRED_STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("case", EACH[1:], ids=str)
def test_compiled_anew_it_gives_the_same_bits(case):
    assert bitwise(Walker(case).walk(2), walker(case).walk(2))


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_the_whole_matrix(case, request):
    here = walker(case)
    got, want = here.walk(1), reference(case, "sgd", 1)
    one = {
        "loss": relative(got.losses, want.losses),
        "gradient": distance(got.gradient, want.gradient),
    }
    sgd, adamw = hundred_steps(case, "sgd"), hundred_steps(case, "adamw")
    long = {
        "losses of SGD": sgd["losses"],
        "parameters of SGD": sgd["params"],
        "losses of AdamW": adamw["losses"],
    }
    request.node.user_properties += [("case", str(case)), *(one | long).items()]
    assert max(one.values()) <= ONE_STEP
    assert max(long.values()) <= HUNDRED_STEPS
    assert bitwise(here.walk(1), got)


def hundred_steps(case: Case, optimizer: str) -> dict[str, float]:
    """How far losses, and for SGD parameters, are from one device's after 100 steps."""
    got, want = walker(case, optimizer).walk(100), reference(case, optimizer, 100)
    assert want.losses[-1] < want.losses[0] - 1, "nothing was learned"
    apart = {"losses": relative(got.losses, want.losses)}
    return apart | ({"params": distance(got.params, want.params)} if optimizer == "sgd" else {})


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative difference of one of the numbers."""
    return float(np.abs(got / want - 1).max())
