"""Pure functions that the tests schedule in other processes. Not a test."""

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

TARGET = np.arange(8, dtype=np.float32)


def square(x):
    return x * x


def add(x, y=1):
    return {"sum": x + y, "both": (x, y)}


def refuse(x):
    raise ValueError(f"no {x}")


def wait(seconds, x):
    time.sleep(seconds)
    return x


def wait_for(marker, seconds=0.0, x=None):
    """Returns some seconds after a file is there."""
    while not Path(marker).exists():
        time.sleep(0.005)
    return wait(seconds, x)


def refuse_after(marker, x):
    wait_for(marker)
    refuse(x)


def process_id():
    return os.getpid()


def devices():
    return [str(device) for device in jax.devices()]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(marker, x):
    """Ends its process the first time; the second time it returns."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def unsendable():
    return object()


@jax.jit
def loss_and_gradient(params, x):
    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - x @ TARGET) ** 2)

    return jax.value_and_grad(loss)(params)


def train(servers, seed):
    x = np.random.default_rng(seed).normal(size=(32, 8)).astype(np.float32)
    loss, grads = loss_and_gradient(servers.pull(), x)
    servers.push(grads)
    return float(loss)


def push_and_die_once(servers, marker):
    """Pushes, and ends its process the first time: it pushes again in another one."""
    servers.push({"w": np.ones(8, np.float32), "b": np.float32(1)})
    die_once(marker, 0)
    servers.push({"w": np.ones(8, np.float32), "b": np.float32(1)})


def push_infinity(servers):
    servers.push({"w": np.full(8, np.inf, np.float32), "b": np.float32(1)})
