"""`jtrain ckpt` on the copies in an object store: `jtrain ckpt ls s3://bucket/runs/NAME`."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import parse_step
from jtrain.config.top import RUNS
from jtrain.errors import FAULT, CheckpointError, UserError
from jtrain.io.formatting import format_bytes
from jtrain.io.object_store import ObjectStore, is_address

Found = tuple[Any, str, int]


def run_action(action: str, args: argparse.Namespace) -> Found | None:
    """Run an action on an address; return None if `copied` and the local action are to do it."""
    if action == "fetch" and not is_address(args.run):
        raise UserError(
            f"jtrain ckpt fetch: {args.run} is not the address of an object store. Write what "
            f"checkpoint.store has, and the run's name: jtrain ckpt fetch s3://bucket/runs/NAME"
        )
    actions = {"ls": _ls, "verify": _verify, "rm": _rm, "fetch": _fetch}
    return actions[action](args) if is_address(args.run) and action in actions else None


@contextlib.contextmanager
def fetch_arguments(args: argparse.Namespace) -> Iterator[None]:
    """Fetch addresses among the arguments, and replace them by local paths."""
    from jtrain.checkpoint import object_store_layout

    with contextlib.ExitStack() as stack:
        for name in ("run", "other"):
            if not is_address(getattr(args, name, "")):
                continue
            objects, asked = _parse_address(getattr(args, name))
            step = _step(objects, asked, getattr(args, "step", "") or "newest")
            directory, faults = stack.enter_context(
                object_store_layout.temporary_copy(objects, step)
            )
            if faults:
                raise _damaged(objects, step, faults)
            setattr(args, name, str(directory / str(step)))
        yield


def _ls(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout, seal

    objects, _ = _parse_address(args.run)
    rows = [
        {"step": step, "bytes": sum(sizes.values()), "sealed": seal.SEAL in sizes}
        for step, sizes in object_store_layout.object_sizes(objects).items()
    ]
    if not rows:
        raise object_store_layout.no_copy_error(objects)
    words = {True: "", False: "incomplete copy"}
    lines = [
        f"{row['step']}  {format_bytes(row['bytes'])}  {words[row['sealed']]}".rstrip()
        for row in rows
    ]
    return {"address": objects.address, "steps": rows}, "\n".join(lines), 0


def _verify(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout

    objects, asked = _parse_address(args.run)
    every = object_store_layout.object_sizes(objects)
    if not every:
        raise object_store_layout.no_copy_error(objects)
    chosen = asked is not None or bool(args.step)
    steps = [_step(objects, asked, args.step)] if chosen else list(every)
    found, lines = [], []
    for step in steps:
        start = time.perf_counter()
        with object_store_layout.temporary_copy(objects, step) as (_, faults):
            count = sum(every.get(step, {}).values())
        seconds = time.perf_counter() - start
        found.append({"step": step, "bytes": count, "seconds": seconds, "faults": faults})
        status = "DAMAGED" if faults else "valid"
        lines.append(f"{step}  {status}  ({format_bytes(count)} in {seconds:.2f} s)")
        lines += [f"  {fault}" for fault in faults]
    damaged = any(one["faults"] for one in found)
    if damaged:
        lines.append(
            f"a restored run takes the newest valid one; to remove the others: jtrain "
            f"ckpt rm {objects.address} --damaged"
        )
    return {"address": objects.address, "steps": found}, "\n".join(lines), FAULT * damaged


def _rm(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import object_store_layout

    objects, asked = _parse_address(args.run)
    every = object_store_layout.object_sizes(objects)
    valid = object_store_layout.list_copies(objects)
    if args.damaged:
        newest = valid[-1] if valid else -1  # a run may be copying a newer one
        wrong = [step for step in every if step < newest and step not in valid]
        wrong += [step for step in valid if _faults(objects, step)]
    else:
        if asked is None and not args.step:
            raise UserError(
                f"jtrain ckpt rm: no step of {objects.address} is named. Write --step N, or "
                f"--damaged for all damaged ones; jtrain ckpt ls {objects.address} lists them"
            )
        step = _step(objects, asked, args.step)
        if not args.force and valid == [step]:
            raise CheckpointError(
                f"checkpoint {step} in {objects.address} is the last valid copy: without it the "
                f"run cannot be restored. To remove it anyway: jtrain ckpt rm "
                f"{objects.address} --step {step} --force"
            )
        wrong = [step]
    count = sum(sum(every[step].values()) for step in wrong)
    for step in wrong:
        object_store_layout.remove(objects, step, every[step])
    names = ", ".join(map(str, wrong)) or "none"
    text = f"removed: {names}; {format_bytes(count)} are free again"
    return {"removed": wrong, "bytes": count}, text, 0


def _fetch(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import layout, object_store_layout
    from jtrain.checkpoint.lock import WriteLock

    objects, asked = _parse_address(args.run)
    path = Path(args.out or RUNS / objects.address.rpartition("/")[2])
    checkpoints = path / object_store_layout.CHECKPOINTS
    if (path / "run.json").exists() or layout.list_named_steps(checkpoints):
        raise CheckpointError(
            f"{objects.address} cannot be fetched to {path}: a run exists there. Name another "
            f"directory: --out {path}-2"
        )
    chosen = asked is not None or bool(args.step)
    step = _step(objects, asked, args.step or "newest")
    layout.make_directory(checkpoints)
    lock = WriteLock(checkpoints)
    try:
        if chosen:
            if faults := object_store_layout.fetch(objects, step, checkpoints):
                raise _damaged(objects, step, faults)
            object_store_layout.fetch_files(objects, path)
            notes: list[str] = []
        else:
            found, notes = object_store_layout.fetch_newest(objects, path)
            if found is None:
                raise CheckpointError("\n".join(notes))
            step = found
    finally:
        lock.release()
    lines = [*notes, f"{path}: the run at step {step}"]
    return {"path": str(path), "step": step, "notes": notes}, "\n".join(lines), 0


def _parse_address(address: str) -> tuple[ObjectStore, int | None]:
    """Return the object store of an address, and the step if the address names one."""
    run, slash, step = address.rstrip("/").partition("/checkpoints")
    named = step.strip("/")
    return ObjectStore(run), int(named) if slash and named.isdigit() else None


def _step(objects: ObjectStore, named: int | None, word: str) -> int:
    from jtrain.checkpoint import object_store_layout

    asked = named if named is not None else parse_step(word, "ckpt")
    available = object_store_layout.object_sizes(objects)
    valid = object_store_layout.list_copies(objects)
    if not valid and asked not in available:
        raise object_store_layout.no_copy_error(objects)
    if asked == "best":
        raise CheckpointError(
            f"--step best was requested of {objects.address}, and copies are not ranked. Write "
            f"newest or one of {', '.join(map(str, valid))}."
        )
    step = valid[-1] if asked == "newest" and valid else asked
    if step not in available:
        raise CheckpointError(
            f"{objects.address} has no copy of step {step}; it has "
            f"{', '.join(map(str, available))}. Request one of these."
        )
    return int(step)


def _faults(objects: ObjectStore, step: int) -> list[str]:
    from jtrain.checkpoint import object_store_layout

    with object_store_layout.temporary_copy(objects, step) as (_, faults):
        return faults


def _damaged(objects: ObjectStore, step: int, faults: list[str]) -> CheckpointError:
    from jtrain.checkpoint import layout

    return CheckpointError(
        f"the copy of checkpoint {step} in {objects.address} is damaged: "
        f"{layout.summarize(faults)}. "
        f"To see which are valid: jtrain ckpt verify {objects.address}"
    )
