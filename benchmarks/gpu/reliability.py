"""The first step, an asynchronous save, and a kill."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from language import CONFIG, words
from sizes import ROUNDS


def start(sizes: str) -> dict[str, Any]:
    """Return the seconds from the command to the first step, with a cold and a warm cache."""
    cache, rows = Path("cache").resolve(), []
    for warm in (False, True):
        seconds = []
        for number in range(ROUNDS[sizes]):
            if not warm:
                shutil.rmtree(cache, ignore_errors=True)
            began = time.perf_counter()
            child = begin([f"name=start{warm}{number}", *short(sizes, 1000)], cache)
            wait_for_step(child, 1)
            seconds.append(time.perf_counter() - began)
            child.kill()
            child.wait()
        what = f"{'warm' if warm else 'cold'} compile cache"
        rows.append({"what": what, "value": statistics.median(seconds), "unit": "s"})
    return {"rows": rows}


def save(sizes: str) -> dict[str, Any]:
    """Return the time that the loop waits for a save, and steps while it is written."""
    from language import trainer

    from jtrain.checkpoint import CheckpointManager
    from jtrain.config.resolve import resolve
    from jtrain.train.program import set_up

    program = set_up(resolve(CONFIG, words("gpt2", "cudnn", sizes)).config)
    take, state = trainer(program), program.initial_state()
    steps = 2 if sizes == "rehearsal" else 20

    def step_times() -> list[float]:
        times = []
        for i in range(steps):
            began = time.perf_counter()
            jax.block_until_ready(take(i))
            times.append(time.perf_counter() - began)
        return times

    step_times()
    quiet, stalls, beside, written = statistics.median(step_times()), [], [], []
    with CheckpointManager(Path("checkpoints").resolve()) as checkpoints:
        for number in range(ROUNDS[sizes] + 1):
            began = time.perf_counter()
            checkpoints.save(number, state, {})
            stalls.append(time.perf_counter() - began)
            beside += step_times()
            checkpoints.wait()
            written.append(time.perf_counter() - began)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    rows = [
        ("size of the state", size / 1e9, "GB"),
        ("a step without a save", 1e3 * quiet, "ms"),
        ("the loop waits for a save", 1e3 * statistics.median(stalls[1:]), "ms"),
        ("a step while a save is written", 1e3 * statistics.median(beside), "ms"),
        ("a save until it is sealed", statistics.median(written[1:]), "s"),
    ]
    return {"rows": [{"what": w, "value": v, "unit": u} for w, v, u in rows]}


def kill(sizes: str) -> dict[str, Any]:
    """Kill a run by SIGKILL, resume it, and compare it with one that was left alone."""
    last, save_every = 6, 2
    given = [*short(sizes, last, "xla"), f"checkpoint.every={save_every}"]
    given.append("xla.preset=deterministic")
    cache = Path("cache").resolve()
    whole = begin(["name=whole", *given], cache)
    said = whole.communicate()[0]
    if whole.returncode:
        raise RuntimeError(said[-1500:])
    child = begin(["name=killed", *given], cache)
    wait_for_step(child, save_every + 1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    again = begin(["name=killed", *given], cache)
    said = again.communicate()[0]
    if again.returncode:
        raise RuntimeError(said[-1500:])

    import jtrain as jt

    losses = [step_losses(name) for name in ("whole", "killed")]
    states = [jax.tree.leaves(jt.load(Path("runs", name)).params) for name in ("whole", "killed")]
    same = all(np.array_equal(a, b) for a, b in zip(*states, strict=True))
    rows = [
        {"what": "steps with the same loss", "value": compare(*losses), "unit": f"of {last}"},
        {"what": "parameters are the same bits", "value": str(same), "unit": ""},
    ]
    if not same or compare(*losses) != last:
        raise RuntimeError(f"the resumed run is another: {rows}")
    return {"rows": rows}


def short(sizes: str, steps: int, attention: str = "cudnn") -> list[str]:
    """Return the values of a run of a few steps."""
    given = words("gpt2", attention, sizes)
    given = [w for w in given if not w.startswith(("steps=", "checkpoint."))]
    return [*given, f"steps={steps}", "optimizer.schedule.warmup=1", "data.rows=64"]


def begin(given: list[str], cache: Path) -> "subprocess.Popen[str]":
    """Start `jtrain run`."""
    return subprocess.Popen(
        [sys.executable, "-m", "jtrain", "run", CONFIG, *given],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(child: "subprocess.Popen[str]", number: int) -> None:
    """Read a run's lines until the step is logged."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        words = line.split()
        if words[:1] == ["step"] and int(words[1].split("/")[0].replace(",", "")) >= number:
            return
    raise RuntimeError("".join(lines)[-1500:])


def step_losses(name: str) -> dict[int, float]:
    """Return the loss of each step of a run; of a step that was taken twice, the last."""
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row and "step" in row}


def compare(left: dict[int, float], right: dict[int, float]) -> int:
    """Return how many steps have the same loss."""
    return sum(left[step] == right.get(step) for step in left)
