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


def test_one_cycle_is_torchs_where_both_have_their_turns():
    """OneCycleLR(total_steps=101, pct_start=0.3): cosines through peak / 25, peak, peak / 25e4."""
    rates = curve(OneCycle(), peak=1.0, steps=101)
    assert rates[[0, 30, 100]] == pytest.approx([1 / 25, 1, 1 / 25e4], rel=1e-4)
    assert rates[15] == pytest.approx((1 / 25 + 1) / 2, rel=1e-5)
    assert rates[65] == pytest.approx((1 + 1 / 25e4) / 2, rel=1e-5)
    assert (np.diff(rates[:31]) > 0).all()
    assert (np.diff(rates[30:]) < 0).all()
