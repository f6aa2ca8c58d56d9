"""What every strategy must do: take the steps that one device takes. A new one is a new row.

The matrix is crossed pairwise: every two values of two columns meet in some case. The first eight
of these run by default, the others are thorough, and the whole matrix runs under `-m slow`;
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
# Adding 32 x 8 numbers in another order moves the last of float32's 24 bits (6e-8) a few times.
ONE_STEP = 1e-6
HUNDRED_STEPS = 1e-4  # in which that grows with the curvature


def pairs(case: Case) -> set:
    """Every two values of the case, by column."""
    values = enumerate((case.strategy, case.devices, case.microbatches, case.data, case.dropout))
    return set(itertools.combinations(values, 2))


def pairwise_cover(matrix: list[Case]) -> list[Case]:
    """Few of the cases in which each pair of the matrix occurs; greedy, the first of equals."""
    missing, chosen = set().union(*map(pairs, matrix)), []
    while missing:
        chosen.append(max(matrix, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


COVER = pairwise_cover(MATRIX)
QUICK = COVER[:8]  # most of the pairs, for it is greedy


def test_the_cover_is_small_and_whole():
    assert len(MATRIX) == (4 * 4 * 3 + 2) * 4 * 2
    assert set().union(*map(pairs, COVER)) == set().union(*map(pairs, MATRIX))
    assert len(COVER) <= 26
    assert {case.strategy for case in QUICK} == set(STRATEGIES)


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.thorough) for case in COVER[len(QUICK) :]),
    ],
    ids=str,
)
def test_takes_the_step_of_one_device_and_repeats_it_bit_for_bit(case):
    here = walker(case)
    got, want = here.walk(2), reference(case, "sgd", 2)
    assert relative(got.losses, want.losses) <= ONE_STEP
    assert distance(got.gradient, want.gradient) <= ONE_STEP
    assert distance(got.params, want.params) <= ONE_STEP
    assert bitwise(here.walk(2), got)


WIDE = {case.strategy: case for case in COVER if case.devices == 8}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "optimizer"), [("mirrored jit", "sgd"), ("fsdp", "sgd"), ("fsdp", "adamw")]
)
def test_is_with_one_device_after_a_hundred_steps(name, optimizer):
    apart = hundred_steps(WIDE[name], optimizer)
    assert max(apart.values()) <= HUNDRED_STEPS


@pytest.mark.parametrize(
    "case",
    [
        WIDE["mirrored jit"],
        *(
            pytest.param(Case(name, 4, 2, "terms", True), marks=pytest.mark.slow)
            for name in STRATEGIES[1:]
        ),
    ],
    ids=str,
)
def test_compiled_anew_it_gives_the_same_bits(case):
    assert bitwise(Walker(case).walk(3), walker(case).walk(3))


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
