"""Learning rates over a run: where they start, peak and end, and the whole curves as text."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.errors import ConfigError
from jtrain.optim import (
    Constant,
    Cosine,
    Exponential,
    InverseSquareRoot,
    Join,
    LinearSchedule,
    OneCycle,
    Restarts,
    SchedulePiece,
    WarmupStableDecay,
)
from jtrain.optim.join import Schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "learning_rates.txt"
STEPS = 12
CURVES = {
    "constant": Constant(),
    "constant, warmup 4": Constant(warmup=4),
    "linear": LinearSchedule(),
    "linear, warmup 3, final 0.5": LinearSchedule(warmup=3, final=0.5),
    "cosine": Cosine(),
    "cosine, warmup 3, final 0": Cosine(warmup=3, final=0.0),
    "wsd": WarmupStableDecay(),
    "wsd, warmup 2, decay 0.5, final 0.1": WarmupStableDecay(warmup=2, decay=0.5, final=0.1),
    "inverse root": InverseSquareRoot(),
    "inverse root, warmup 3, timescale 2": InverseSquareRoot(warmup=3, timescale=2),
    "exponential": Exponential(),
    "exponential, first 0.01, final 1": Exponential(first=0.01, final=1.0),
    "one cycle": OneCycle(),
    "one cycle, rise 0.5, first 0.5, final 0.1": OneCycle(rise=0.5, first=0.5, final=0.1),
    "restarts, cycles 3": Restarts(cycles=3),
    "restarts, warmup 3, cycles 2, growth 2, final 0.1": Restarts(
        warmup=3, cycles=2, growth=2, final=0.1
    ),
    "join: 2 at 0.5, then linear": Join(
        pieces=(
            SchedulePiece(steps=2, peak=0.5),
            SchedulePiece(schedule=LinearSchedule(warmup=1, final=0.5)),
        )
    ),
}


def curve(schedule: Schedule, peak: float = 1.0, steps: int = STEPS) -> np.ndarray:
    return np.asarray(jax.vmap(schedule.build(peak, steps))(jnp.arange(steps)))


@pytest.mark.thorough
def test_curves_are_those_of_the_golden_file():
    width = max(map(len, CURVES))
    text = "".join(
        f"{name:{width}} | {' '.join(f'{rate:.4f}' for rate in curve(schedule))}\n"
        for name, schedule in CURVES.items()
    )
    found, golden = (
        [line.split("|") for line in t.splitlines()] for t in (text, GOLDEN.read_text())
    )
    assert [line[0] for line in found] == [line[0] for line in golden], f"the new text:\n{text}"
    for (name, new), (_, old) in zip(found, golden, strict=True):
        message = f"{name}: the new text:\n{text}"
        new, old = (np.array(rates.split(), float) for rates in (new, old))
        assert_close(new, old, 1.01e-4, terms=1, says=message)


@pytest.mark.thorough
def test_every_schedule_ends_where_it_says():
    for schedule in CURVES.values():
        if hasattr(schedule, "final") or isinstance(schedule, Constant):
            final = getattr(schedule, "final", 1.0)
            rates = curve(schedule, peak=0.3, steps=1000)
            assert rates[-1] == pytest.approx(0.3 * final, abs=1e-7)
            assert rates.max() == pytest.approx(0.3)
            assert float(schedule.build(0.3, 1000)(5000)) == pytest.approx(0.3 * final, abs=1e-7)


@pytest.mark.thorough
def test_the_log_reads_the_rate_that_the_step_takes():
    """Check that the rate of an int is a float by numpy, and that of an array is by jax."""
    for schedule in CURVES.values():
        rate = schedule.build(0.3, STEPS)
        logged = [rate(step) for step in range(STEPS)]
        assert all(type(value) is float for value in logged)
        assert_close(logged, curve(schedule, 0.3), 2e-6)


def test_a_length_that_is_too_short_is_told_by_its_own_key():
    with pytest.raises(ConfigError, match=r"schedule\.steps 5: warmup 5 .*schedule\.steps=50\)"):
        Cosine(steps=5, warmup=5).build(1.0, 100)


@pytest.mark.thorough
def test_cosine_is_its_formula():
    rates = curve(Cosine(warmup=10, final=0.1), peak=2.0, steps=101)
    for step in range(10, 101):
        x = (step - 10) / 90
        assert rates[step] == pytest.approx(2 * (0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2), rel=1e-5)


def test_wsd_holds_the_peak_until_its_last_share():
    rates = curve(WarmupStableDecay(decay=0.25), steps=101)
    assert_close(rates[:76], 1.0, 1e-7)
    assert_close(rates[75:], np.linspace(1, 0, 26), 1e-6)


@pytest.mark.thorough
def test_inverse_square_root_is_that_of_the_transformer():
    """Vaswani et al., section 5.3, by its peak: min(step^-0.5, step x warmup^-1.5), from 1."""
    rates = curve(InverseSquareRoot(warmup=99), peak=0.1, steps=1000)
    step = np.arange(1, 1001)
    formula = np.minimum(step**-0.5, step * 100**-1.5)
    assert_close(rates, 0.1 * formula / formula.max(), 1e-5)
    half = InverseSquareRoot(timescale=300).build(1.0, 10)
    assert half(300) == pytest.approx(0.5**0.5)


def test_one_cycle_is_torchs_where_both_have_their_turns():
    """OneCycleLR(total_steps=101, pct_start=0.3): cosines through peak / 25, peak, peak / 25e4."""
    rates = curve(OneCycle(), peak=1.0, steps=101)
    assert rates[[0, 30, 100]] == pytest.approx([1 / 25, 1, 1 / 25e4], rel=1e-4)
    assert rates[15] == pytest.approx((1 / 25 + 1) / 2, rel=1e-5)
    assert rates[65] == pytest.approx((1 + 1 / 25e4) / 2, rel=1e-5)
    assert (np.diff(rates[:31]) > 0).all()
    assert (np.diff(rates[30:]) < 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize(("growth", "starts"), [(1, [10, 40, 70]), (2, [10, 40, 100])])
def test_each_restart_is_a_cosine_of_its_own(growth: float, starts: list[int]):
    cycles, steps = len(starts), {1: 100, 2: 220}[growth]
    rates = curve(Restarts(warmup=10, cycles=cycles, growth=growth, final=0.2), steps=steps)
    for first, after in zip(starts, [*starts[1:], steps], strict=True):
        alone = curve(Cosine(final=0.2), steps=after - first)
        assert_close(rates[first:after], alone, 1e-5)


@pytest.mark.slow
def test_joined_pieces_are_what_each_is_alone():
    pieces = (
        SchedulePiece(steps=5, peak=0.1, schedule=LinearSchedule(final=0.5)),
        SchedulePiece(steps=0, schedule=Cosine(warmup=3)),
        SchedulePiece(steps=10, peak=2.0, schedule=Restarts(cycles=2)),
    )
    rates = curve(Join(pieces=pieces), peak=3.0, steps=40)
    for first, length, piece in zip([0, 5, 30], [5, 25, 10], pieces, strict=True):
        alone = curve(piece.schedule, peak=3.0 * piece.peak, steps=length)
        assert_close(rates[first : first + length], alone, 1e-6)


def test_exponential_has_one_factor_from_step_to_step():
    rates = curve(Exponential(first=1e-4, final=1.0), steps=101)
    assert rates[0] == pytest.approx(1e-4, rel=1e-5)
    assert rates[-1] == pytest.approx(1.0, rel=1e-5)
    assert rates[1:] / rates[:-1] == pytest.approx(np.full(100, 10 ** (4 / 100)), rel=1e-4)
