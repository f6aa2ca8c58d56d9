"""Two processes save one checkpoint together, and one process restores it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_of_two import value
from two_processes import in_two_processes

from jtrain.checkpoint import CheckpointManager

SCRIPT = Path(__file__).with_name("one_of_two.py")


@pytest.mark.thorough  # tests/train/test_launched_runs.py saves in two processes by default
def test_two_processes_save_what_one_restores(tmp_path: Path):
    words = lambda port, index: (tmp_path / "c", port, str(index))
    in_two_processes(SCRIPT, words, patience=300)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = CheckpointManager(tmp_path / "c")
    assert checkpoints.steps() == [2, 4]
    assert (tmp_path / "c" / "5.damaged").is_dir(), "both resumed from 4"
    like = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=one),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=one),
        "rng": jax.eval_shape(lambda: jax.random.key(0)).update(sharding=one),
    }
    back = checkpoints.restore(4, like)
    np.testing.assert_array_equal(back["w"], value(4))
    assert int(back["step"]) == 4
    assert jax.random.key_data(back["rng"]).tolist() == [0, 5]
