"""Learning rates over a run: where they start, peak and end, and the whole curves as text."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from jtrain.optim import Constant, Cosine, Linear, WarmupStableDecay
from jtrain.optim.schedules import Schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "learning_rates.txt"
STEPS = 12
CURVES = {
    "constant": Constant(),
    "constant, warmup 4": Constant(warmup=4),
    "linear": Linear(),
    "linear, warmup 3, final 0.5": Linear(warmup=3, final=0.5),
    "cosine": Cosine(),
    "cosine, warmup 3, final 0": Cosine(warmup=3, final=0.0),
    "wsd": WarmupStableDecay(),
    "wsd, warmup 2, decay 0.5, final 0.1": WarmupStableDecay(warmup=2, decay=0.5, final=0.1),
}
every = pytest.mark.parametrize("schedule", CURVES.values(), ids=CURVES.keys())


def curve(schedule: Schedule, peak: float = 1.0, steps: int = STEPS) -> np.ndarray:
    return np.asarray(jax.vmap(schedule.build(peak, steps))(jnp.arange(steps)))


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
        np.testing.assert_allclose(new, old, atol=1.01e-4, err_msg=message)


@every
def test_ends_where_it_says(schedule: Schedule):
    final = getattr(schedule, "final", 1.0)
    rates = curve(schedule, peak=0.3, steps=1000)
    assert rates[-1] == pytest.approx(0.3 * final, abs=1e-7)
    assert rates.max() == pytest.approx(0.3)
    assert float(schedule.build(0.3, 1000)(5000)) == pytest.approx(0.3 * final, abs=1e-7)


@every
def test_warms_up_in_a_line_that_wastes_no_step(schedule: Schedule):
    warmup = schedule.warmup
    rates = curve(schedule)
    np.testing.assert_allclose(
        rates[: warmup + 1], np.arange(1, warmup + 2) / (warmup + 1), rtol=1e-6
    )
    assert (np.diff(rates[warmup:]) <= 1e-7).all(), "never rises after the warmup"


@every
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_short_run_has_rates_too(schedule: Schedule, steps: int):
    if schedule.warmup >= steps:
        schedule = type(schedule)()
    rates = curve(schedule, steps=steps)
    assert rates.shape == (steps,)
    assert rates[0] == pytest.approx(1 / (schedule.warmup + 1))
    assert ((rates >= 0) & (rates <= 1)).all()


@every
def test_the_log_reads_the_rate_that_the_step_takes(schedule: Schedule):
    """Of an int the rate is a float, of numpy's making; the step's own is jax's."""
    rate = schedule.build(0.3, STEPS)
    logged = [rate(step) for step in range(STEPS)]
    assert all(type(value) is float for value in logged)
    np.testing.assert_allclose(logged, curve(schedule, 0.3), rtol=1e-6, atol=1e-8)


def test_cosine_is_its_formula():
    rates = curve(Cosine(warmup=10, final=0.1), peak=2.0, steps=101)
    for step in range(10, 101):
        x = (step - 10) / 90
        assert rates[step] == pytest.approx(2 * (0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2), rel=1e-5)


def test_wsd_holds_the_peak_until_its_last_share():
    rates = curve(WarmupStableDecay(decay=0.25), steps=101)
    np.testing.assert_allclose(rates[:76], 1.0)
    np.testing.assert_allclose(rates[75:], np.linspace(1, 0, 26), atol=1e-6)


@every
def test_reads_itself_back_from_plain_data(schedule: Schedule):
    adapter = pydantic.TypeAdapter(Schedule)
    assert adapter.validate_python(adapter.dump_python(schedule)) == schedule
