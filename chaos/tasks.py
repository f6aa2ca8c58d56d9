"""Tasks of a process with faults: train, save, or check what is left."""

import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chaos import subject
from chaos.shim import Shim
from jtrain.checkpoint import CheckpointManager, SaveRetries, layout, storage
from jtrain.checkpoint.save_errors import SaveError, state_bytes
from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError, UserError
from jtrain.io.log import LOG
from jtrain.train.hooks.function_hooks import Observer

RUN = Path("runs") / "hurt"
CHECKPOINTS = RUN / "checkpoints"
SAVED = Path("saved")


def warm() -> None:
    """Import the modules of the tasks, without starting a device."""
    import jtrain.train.run  # noqa: F401

    storage.import_orbax()


def train(
    each: int = 1,
    compiled: str = "",
    kill_at: int = 0,
    fail: Sequence[int] = (),
    hooks: tuple[Observer, ...] = (),
) -> dict[str, Any]:
    """Run or resume subject.py to its end; return the result.

    Args:
        each: steps in a call.
        compiled: the compilation cache; empty: the server's.
        kill_at: the file operation below runs/ before which it is killed; 0: never.
        fail: an errno, and the first and the last checkpoint operation that fails with it.
        hooks: observers of the run.
    """
    from jtrain.train.run import run

    if compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    RUN.parent.mkdir(exist_ok=True)
    file = Shim()
    if kill_at:
        file.kill_at(RUN.parent, kill_at)
    elif fail:
        file.fail(CHECKPOINTS, *fail)
    else:
        file.watch(RUN.parent)
    outcome = run(subject.config(each), hooks=hooks)
    operations = file.count()
    file.rest()
    return {"status": outcome.status, "operations": operations, **came_to(each)}


def came_to(each: int = 1) -> dict[str, Any]:
    """Return the digests of a run's newest checkpoint, leaf by leaf, and of its metrics."""
    from jtrain.train.program import set_up

    like = set_up(subject.config(each)).resolved.abstract_state
    checkpoints = CheckpointManager(CHECKPOINTS)
    newest = checkpoints.newest()
    assert newest is not None
    return {
        "step": newest,
        "leaves": digests(checkpoints.restore(newest, like)),
        "batches": checkpoints.about(newest)["batches"],
        "metrics": hashlib.sha256((RUN / "metrics.jsonl").read_bytes()).hexdigest(),
        "bytes": state_bytes(like),
    }


def digests(state: Any) -> dict[str, str]:
    """Return the digest of each leaf's bytes, by name."""
    return {name: hashlib.sha256(_bytes(x)).hexdigest() for name, x in named_leaves(state).items()}


def state_of(step: int) -> dict[str, jax.Array]:
    """Return a state that is a function of its step, so that a mix of two steps is noticed."""
    return {
        "w": jnp.sin(jnp.arange(3000.0) * (step + 1)),
        "v": jnp.arange(64, dtype=jnp.int32).reshape(8, 8) * step,
        "key": jax.random.key(step),
        "step": jnp.int32(step),
    }


def save(step: int, kill_at: int = 0) -> dict[str, Any]:
    """Save a step with a retention of two; return the number of file operations.

    Args:
        step: the new step, larger than the existing ones.
        kill_at: the operation before which the process is killed; 0: never.
    """
    file = Shim()
    with CheckpointManager(SAVED, keep=2) as checkpoints:
        if kill_at:
            file.kill_at(SAVED, kill_at)
        else:
            file.watch(SAVED)
        checkpoints.save(step, state_of(step), {"s": step})
        checkpoints.wait()
        operations = file.count()
        file.rest()
    return {"operations": operations}


def save_recorded(log: str) -> dict[str, Any]:
    """Save six times, one step twice, into a new folder, and record all operations."""
    file = Shim()
    Path("runs").mkdir()
    root = Path().resolve()
    file.watch(root / "runs", Path(log))
    with CheckpointManager(root / "runs" / "cut" / "checkpoints", keep=2) as checkpoints:
        for step in (1, 2, 2, 3, 4, 5):
            checkpoints.save(step, state_of(step), {"s": step}, sealed=file.mark)
        checkpoints.wait()
    file.rest()
    return {}


def resume(step: int, there: str = str(SAVED)) -> dict[str, Any]:
    """Resume and save another step; return the resumed step and the result."""
    place = Path(there)
    with CheckpointManager(place, keep=2) as checkpoints:
        resumed = checkpoints.resume()
        checkpoints.save(step, state_of(step), {"s": step})
        checkpoints.wait()
        news = checkpoints.notices
    names = sorted(path.name for path in place.iterdir())
    return {"resumed": resumed, "news": news, "names": names, **check_steps(there)}


def after_cuts(there: Mapping[str, str], step: int) -> dict[str, Any]:
    """Return the listed steps and the next start in each directory."""
    return {
        name: {"before": check_steps(place), **resume(step, place)} for name, place in there.items()
    }


def save_failing(step: int, error: int, point: int) -> dict[str, Any]:
    """Save three times: operation `point` of the first fails, in the second all from there on.

    While the second fails the state is offered again as often as in a run; then the disk recovers
    and the third is saved. Returns the reports, and the seconds after the first failure.
    """
    file, reports = Shim(), []
    began = time.monotonic()
    handler = logging.Handler()
    handler.emit = lambda record: reports.append([time.monotonic() - began, record.getMessage()])
    LOG.addHandler(handler)
    with CheckpointManager(SAVED, keep=2) as checkpoints:
        checkpoints.prepare()
        retries = SaveRetries(checkpoints)
        file.fail(SAVED, error, point, point)
        _insist(retries, step)
        once, ended = len(reports), ""
        file.fail(SAVED, error, point)
        began = time.monotonic()
        try:
            _insist(retries, step + 1)
        except SaveError as last:
            ended = str(last)
        seconds = time.monotonic() - began
        file.rest()
        _insist(SaveRetries(checkpoints), step + 2)
    return {"told": reports, "once": once, "ended": ended, "seconds": seconds, **check_steps()}


def _insist(retries: SaveRetries, step: int) -> None:
    """Save as a run does at its end."""
    retries.save(step, state_of(step), {"s": step})
    while retries.last_save_failed():
        retries.save(step, state_of(step), {"s": step})


def check_steps(there: str = str(SAVED)) -> dict[str, Any]:
    """Return the listed steps, and the reason for each that differs from the saved state."""
    checkpoints, wrong = CheckpointManager(Path(there)), {}
    for step in (steps := checkpoints.steps()):
        try:
            restored = checkpoints.restore(step, jax.eval_shape(lambda step=step: state_of(step)))
            if digests(restored) != digests(state_of(step)) or checkpoints.about(step) != {
                "s": step
            }:
                wrong[step] = "another state"
        except Exception as error:
            wrong[step] = f"{type(error).__name__}: {error}"
    return {"steps": steps, "wrong": wrong}


def hammer(who: int, seconds: float, seed: int) -> dict[str, Any]:
    """Save as one of two writers in one directory, holding the lock for a while each time."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    saved, refused = 0, []
    while time.monotonic() < end:
        checkpoints, began = CheckpointManager(SAVED, keep=0), time.monotonic()
        try:
            checkpoints.acquire()
        except CheckpointError as error:
            refused.append([time.monotonic() - began, str(error)])
            continue
        with checkpoints:
            for _ in range(draw.randint(1, 6)):
                step = draw.randrange(30)
                checkpoints.save(step, _owned(who, step), {"who": who})
                saved += 1
            checkpoints.wait()
        time.sleep(draw.uniform(0, 0.3))
    Path(f"hammer-{who}.json").write_text(json.dumps({"saved": saved, "refused": refused}))
    return {}


def hammered() -> dict[str, Any]:
    """Return the steps of two writers, and the reason for each that is not of one writer alone."""
    checkpoints, wrong = CheckpointManager(SAVED), {}
    for step in (steps := checkpoints.steps()):
        try:
            who = checkpoints.about(step)["who"]
            like = jax.eval_shape(lambda step=step: _owned(1, step))
            if digests(checkpoints.restore(step, like)) != digests(_owned(who, step)):
                wrong[step] = "mixed"
        except CheckpointError as error:
            wrong[step] = str(error)
    return {"steps": steps, "wrong": wrong}


def _owned(who: int, step: int) -> dict[str, jax.Array]:
    return {f"w{i}": jnp.full(2000, who * 1000.0 + step + i / 8) for i in range(8)}


def train_nowhere(error: int) -> dict[str, Any]:
    """Run in a directory that cannot be written; write the refusal to nowhere.json.

    Args:
        error: an errno of all operations below runs/; 0: a file has that name.
    """
    from jtrain.train.run import run

    read: list[int] = []
    build = subject.Config.build
    watched = lambda self, place: read.append(1) or build(self, place)
    subject.Config.build = watched
    began, refusal = time.monotonic(), ""
    if error:
        RUN.parent.mkdir()
        Shim().fail(RUN.parent, error)
    else:
        RUN.parent.write_text("in the way")
    try:
        run(subject.config())
    except UserError as cause:
        refusal = str(cause)
    seconds = time.monotonic() - began
    found = {"read": bool(read), "seconds": seconds, "told": refusal}
    Path("nowhere.json").write_text(json.dumps(found))
    return found


def end(how: str, size: int) -> dict[str, Any]:
    """Begin to save step 1, and end in the given way."""
    checkpoints = CheckpointManager(SAVED)
    checkpoints.save(1, {"w": jnp.arange(float(size))}, {})
    os.write(1, b"saving\n")
    if how == "exit":
        sys.exit()
    if how == "raise":
        raise RuntimeError("an error in the script")
    if how == "interrupt":
        time.sleep(60)
    return {}


def listed() -> dict[str, Any]:
    """Return the listed steps, and those of them that are damaged."""
    checkpoints = CheckpointManager(SAVED)
    steps = checkpoints.steps()
    wrong = {step: found for step in steps if (found := layout.find_faults(SAVED, step, full=True))}
    return {"steps": steps, "wrong": wrong}


def _bytes(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    given = globals()[sys.argv[1]](**json.loads(sys.argv[3]))
    Path("gave.json").write_text(json.dumps(given))
