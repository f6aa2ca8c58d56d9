"""`jtrain ckpt` of the copies in an object store: `jtrain ckpt ls s3://bucket/runs/NAME`."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jtrain.cli.find_run import asked_step
from jtrain.errors import FAULT, CheckpointError, UserError
from jtrain.io.object_store import ObjectStore, is_address

Found = tuple[Any, str, int]


def act(does: str, typed: argparse.Namespace) -> Found | None:
    """Do what was asked of an address; None if it is done as on the disk, with `copied`."""
    if does == "fetch" and not is_address(typed.run):
        raise UserError(
            f"jtrain ckpt fetch: {typed.run} is no address of an object store. Write what "
            f"checkpoint.store says, and the run's name: jtrain ckpt fetch s3://bucket/runs/NAME"
        )
    acts: Mapping[str, Callable[[argparse.Namespace], Found]] = {
        "ls": _ls,
        "verify": _verify,
        "rm": _rm,
        "fetch": _fetch,
    }
    return acts[does](typed) if is_address(typed.run) and does in acts else None


@contextlib.contextmanager
def copied(typed: argparse.Namespace) -> Iterator[None]:
    """Within, addresses among what was typed are paths of checkpoints that were fetched."""
    from jtrain.checkpoint import object_store_layout

    with contextlib.ExitStack() as stack:
        for name in ("run", "other"):
            if not is_address(getattr(typed, name, "")):
                continue
            objects, asked = _place(getattr(typed, name))
            step = _step(objects, asked, getattr(typed, "step", "") or "newest")
            directory, faults = stack.enter_context(object_store_layout.here(objects, step))
            if faults:
                raise _damaged(objects, step, faults)
            setattr(typed, name, str(directory / str(step)))
        yield


def _ls(typed: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout, seal
    from jtrain.checkpoint.disk_space import size

    objects, _ = _place(typed.run)
    rows = [
        {"step": step, "bytes": sum(sizes.values()), "sealed": seal.SEAL in sizes}
        for step, sizes in object_store_layout.listed(objects).items()
    ]
    if not rows:
        raise object_store_layout.no_copy(objects)
    words = {True: "", False: "not copied to its end"}
    lines = [
        f"{row['step']}  {size(row['bytes'])}  {words[row['sealed']]}".rstrip() for row in rows
    ]
    return {"address": objects.address, "steps": rows}, "\n".join(lines), 0


def _verify(typed: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout
    from jtrain.checkpoint.disk_space import size

    objects, asked = _place(typed.run)
    every = object_store_layout.listed(objects)
    if not every:
        raise object_store_layout.no_copy(objects)
    chosen = asked is not None or bool(typed.step)
    steps = [_step(objects, asked, typed.step)] if chosen else list(every)
    found, lines = [], []
    for step in steps:
        start = time.perf_counter()
        with object_store_layout.here(objects, step) as (_, faults):
            count = sum(every.get(step, {}).values())
        seconds = time.perf_counter() - start
        found.append({"step": step, "bytes": count, "seconds": seconds, "faults": faults})
        told = "DAMAGED" if faults else "whole"
        lines += [
            f"{step}  {told}  ({size(count)} in {seconds:.2f} s)",
            *(f"  {f}" for f in faults),
        ]
    bad = any(one["faults"] for one in found)
    if bad:
        lines.append(
            f"a run that comes back takes the newest that is whole; to remove the others: jtrain "
            f"ckpt rm {objects.address} --damaged"
        )
    return {"address": objects.address, "steps": found}, "\n".join(lines), FAULT * bad


def _rm(typed: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout
    from jtrain.checkpoint.disk_space import size

    objects, asked = _place(typed.run)
    every, whole = object_store_layout.listed(objects), object_store_layout.steps(objects)
    if typed.damaged:
        newest = whole[-1] if whole else -1  # past it, a run may be copying one
        wrong = [step for step in every if step < newest and step not in whole]
        wrong += [step for step in whole if _faults(objects, step)]
    else:
        if asked is None and not typed.step:
            raise UserError(
                f"jtrain ckpt rm: which step of {objects.address}? Write --step N, or --damaged "
                f"for all that are; jtrain ckpt ls {objects.address} lists them"
            )
        step = _step(objects, asked, typed.step)
        if not typed.force and whole == [step]:
            raise CheckpointError(
                f"checkpoint {step} in {objects.address} is the last whole copy: without it the "
                f"run cannot come back. To remove it all the same: jtrain ckpt rm "
                f"{objects.address} --step {step} --force"
            )
        wrong = [step]
    count = sum(sum(every[step].values()) for step in wrong)
    for step in wrong:
        object_store_layout.remove(objects, step, every[step])
    names = ", ".join(map(str, wrong)) or "none"
    return {"removed": wrong, "bytes": count}, f"removed: {names}; {size(count)} are free again", 0


def _fetch(typed: argparse.Namespace) -> Found:
    from jtrain.checkpoint import layout, object_store_layout
    from jtrain.checkpoint.lock import Lock

    objects, asked = _place(typed.run)
    path = Path(typed.out or Path("runs") / objects.address.rpartition("/")[2])
    if (path / "run.json").exists() or layout.named_steps(path / object_store_layout.CHECKPOINTS):
        raise CheckpointError(
            f"{objects.address} was to be fetched to {path}, where a run lies. Name another "
            f"place: --out {path}-2"
        )
    chosen = asked is not None or bool(typed.step)
    step = _step(objects, asked, typed.step or "newest")
    layout.make_directory(path / object_store_layout.CHECKPOINTS)
    lock = Lock(path / object_store_layout.CHECKPOINTS)
    try:
        if chosen:
            if faults := object_store_layout.fetch(
                objects, step, path / object_store_layout.CHECKPOINTS
            ):
                raise _damaged(objects, step, faults)
            object_store_layout.fetch_files(objects, path)
            news: list[str] = []
        else:
            found, news = object_store_layout.fetch_newest(objects, path)
            if found is None:
                raise CheckpointError("\n".join(news))
            step = found
    finally:
        lock.release()
    lines = [*news, f"{path}: the run as it was at step {step}"]
    return {"path": str(path), "step": step, "notes": news}, "\n".join(lines), 0


def _place(address: str) -> tuple[ObjectStore, int | None]:
    """The copies that an address means, and the step if it is one of them."""
    run, slash, step = address.rstrip("/").partition("/checkpoints")
    named = step.strip("/")
    return ObjectStore(run), int(named) if slash and named.isdigit() else None


def _step(objects: ObjectStore, named: int | None, typed: str) -> int:
    from jtrain.checkpoint import object_store_layout

    asked = named if named is not None else asked_step(typed, "ckpt")
    there = object_store_layout.listed(objects)
    whole = object_store_layout.steps(objects)
    if not whole and asked not in there:
        raise object_store_layout.no_copy(objects)
    if asked == "best":
        raise CheckpointError(
            f"--step best was asked for of {objects.address}, and copies are not compared. Write "
            f"newest or one of {', '.join(map(str, whole))}."
        )
    step = whole[-1] if asked == "newest" and whole else asked
    if step not in there:
        raise CheckpointError(
            f"there is no copy of step {step} in {objects.address}: there are "
            f"{', '.join(map(str, there))}. Ask for one of these."
        )
    return int(step)


def _faults(objects: ObjectStore, step: int) -> list[str]:
    from jtrain.checkpoint import object_store_layout

    with object_store_layout.here(objects, step) as (_, faults):
        return faults


def _damaged(objects: ObjectStore, step: int, faults: list[str]) -> CheckpointError:
    from jtrain.checkpoint import layout

    return CheckpointError(
        f"the copy of checkpoint {step} in {objects.address} is damaged: {layout.first(faults)}. "
        f"See which is whole: jtrain ckpt verify {objects.address}"
    )
