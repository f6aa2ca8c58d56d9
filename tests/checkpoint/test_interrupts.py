"""A Ctrl-C at any moment of a save or of its end does not affect later saves."""

import gc
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_states import like, same_bits
from interrupts import interrupted

from jtrain.checkpoint import CheckpointManager

STATE = {"w": jnp.arange(1000.0), "step": jnp.int32(0)}


def save(checkpoints: CheckpointManager, step: int) -> None:
    checkpoints.save(step, STATE | {"step": jnp.int32(step)}, {})
    checkpoints.wait()


# An interrupt in a callback of the garbage collector is printed and not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(17, marks=pytest.mark.thorough),  # about a hundred moments, of 1,600
        pytest.param(1, marks=pytest.mark.slow),
    ],
)
def test_saves_after_an_interrupt_are_valid_and_so_are_earlier_ones(tmp_path: Path, stride: int):
    def save_and_wait(checkpoints: CheckpointManager, step: int) -> None:
        checkpoints.prepare()
        save(checkpoints, step)
        checkpoints.close()

    kept: list[KeyboardInterrupt] = []
    moment, step, came = 0, 0, True
    with CheckpointManager(tmp_path / "kept", keep=3) as checkpoints:
        while came:
            came = interrupted(lambda step=step: save_and_wait(checkpoints, step), moment, kept)
            save(checkpoints, step + 1)
            assert step + 1 in checkpoints.steps()
            for each in checkpoints.steps():
                found = checkpoints.restore(each, like(STATE))
                assert same_bits(found, STATE | {"step": jnp.int32(each)})
            step += 2
            moment += stride
    assert len(kept) >= 80, "too few to prove anything"
    # Files that an interrupt left open are closed here, not in the next test.
    kept.clear()
    gc.collect()
