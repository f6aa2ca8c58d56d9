"""Speeds of this machine's processor, measured once and kept, for the order of estimates."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.inspect.plan.compiled_step import plan_cache
from jtrain.inspect.plan.schedule import Speeds
from jtrain.io.regular_files import atomic_write


def cpu_speeds(devices: int) -> Speeds:
    """Return the speeds of a virtual device: a share of the machine's.

    They are in the cache of plans, so that two estimates differ by their programs alone.
    """
    file = plan_cache() / "cpu_speeds.json"
    flops, memory = _read(file) or _measure(file)
    share = memory / devices
    return Speeds(flops / devices, share, share, lambda _: share / 2)


def _measure(file: Path) -> tuple[float, float]:
    """Measure operations and bytes a second, and write them."""
    size = 1024
    x, large = jnp.ones((size, size), jnp.float32), jnp.ones(2**22, jnp.float32)
    product, total = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    flops = 2.0 * size**3 / _fastest(lambda: product(x))
    memory = 2.0 * large.nbytes / _fastest(lambda: total(large))
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        atomic_write(file, json.dumps({"flops": flops, "memory": memory}).encode())
    return flops, memory


def _read(file: Path) -> tuple[float, float] | None:
    try:
        found = json.loads(file.read_text())
        return float(found["flops"]), float(found["memory"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _fastest(run: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return the shortest time of a call, repeated for some seconds."""
    jax.block_until_ready(run())
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best
