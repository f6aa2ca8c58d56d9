"""Two processes save one checkpoint together, and one process restores it."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from one_of_two import value

from jtrain.checkpoint import Checkpoints

SCRIPT = Path(__file__).with_name("one_of_two.py")


def test_two_processes_save_what_one_restores(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    command = [sys.executable, "-W", "error", str(SCRIPT), str(tmp_path / "c"), port]
    processes = [
        subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    try:
        for process in processes:
            _, complaints = process.communicate(timeout=100)
            assert process.returncode == 0, complaints
    finally:
        for process in processes:
            process.kill()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.steps() == [2, 4]
    like = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=one),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=one),
        "rng": jax.eval_shape(lambda: jax.random.key(0)).update(sharding=one),
    }
    back = checkpoints.restore(4, like)
    np.testing.assert_array_equal(back["w"], value(4))
    assert int(back["step"]) == 4
    assert jax.random.key_data(back["rng"]).tolist() == [0, 5]
