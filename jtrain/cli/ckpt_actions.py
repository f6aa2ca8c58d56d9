"""Actions of `jtrain ckpt` on checkpoints of this machine, and on copies in an object store."""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.checkpoint import directory_entries, inspect, layout, object_store_layout, seal
from jtrain.checkpoint.lock import WriteLock
from jtrain.cli.arguments import parse_step
from jtrain.cli.export import export_safetensors
from jtrain.config.top import RUNS
from jtrain.errors import FAULT, CheckpointError, UserError
from jtrain.io.formatting import align_columns, format_bytes
from jtrain.io.object_store import ObjectStore, is_address
from jtrain.train.run_dir import RunDir

ActionResult: TypeAlias = tuple[Any, str, int]  # for --json, for a person, the exit code


def run_action(action: str, args: argparse.Namespace) -> ActionResult:
    """Run an action on a run of this machine, or on the copies at an address."""
    if action == "fetch" and not is_address(args.run):
        raise UserError(
            f"jtrain ckpt fetch: {args.run} is not the address of an object store. Write what "
            f"checkpoint.store has, and the run's name: jtrain ckpt fetch s3://bucket/runs/NAME"
        )
    local = {"ls": _ls, "verify": _verify, "show": _show, "diff": _diff, "rm": _rm}
    local["export"] = _export
    stored = {"ls": _list_copies, "verify": _verify_copies, "fetch": _fetch_run}
    if is_address(args.run) and action == "rm":
        raise UserError(
            f"jtrain ckpt rm: {args.run} is an object store, whose own tools remove objects: aws "
            f"s3 rm --recursive, gcloud storage rm --recursive, az storage blob delete-batch"
        )
    if is_address(args.run) and action in stored:
        return stored[action](args)
    with fetch_arguments(args):
        return local[action](args)


def _ls(args: argparse.Namespace) -> ActionResult:
    directory, _ = inspect.find_checkpoint(args.run)
    rows = inspect.list_checkpoints(directory, _owner(directory))
    aside = directory_entries.list_set_aside(directory)
    lines = [("step", "size", "saved", "", "")]
    for row in rows:
        best = row["best"]
        value = f"{best['name']} {best['value']:.6g}" if best.get("value") is not None else ""
        marks = ", ".join(row["marks"])
        state = f"{_fault_of(row)}: {row['faults'][0]}" if row["faults"] else marks
        lines.append(
            (str(row["step"]), format_bytes(row["bytes"]), _when(row["seconds"]), value, state)
        )
    for path in aside:
        size, when = format_bytes(inspect.num_bytes(path)), _when(path.stat().st_mtime)
        damaged = directory_entries.DAMAGED in path.name
        reason = (
            "set aside; to remove: ckpt rm --damaged" if damaged else "set aside: of another run"
        )
        lines.append((path.name, size, when, "", reason))
    found = {
        "directory": str(directory),
        "steps": rows,
        "damaged": [path.name for path in aside if directory_entries.DAMAGED in path.name],
        "foreign": [path.name for path in aside if directory_entries.FOREIGN in path.name],
    }
    return found, _table(lines), 0


def _verify(args: argparse.Namespace) -> ActionResult:
    directory, named = inspect.find_checkpoint(args.run)
    asked = named if named is not None else parse_step(args.step, "ckpt") if args.step else None
    owner = _owner(directory)
    if asked is None:
        steps = layout.list_named_steps(directory)
    else:
        steps = [inspect.resolve_step(directory, asked, owner)]
    found = [inspect.verify(directory, step, owner) for step in steps]
    advice = (
        "jtrain run resumes from the newest valid one, and sets damaged ones aside; to remove "
        f"them: jtrain ckpt rm {directory} --damaged"
    )
    return _report_verified({"directory": str(directory), "steps": found}, advice)


def _report_verified(report: Mapping[str, Any], advice: str) -> ActionResult:
    """Return the result of `verify`; `advice` is given if a step is damaged."""
    lines, damaged = [], False
    for one in report["steps"]:
        took = f"({format_bytes(one['bytes'])} in {one['seconds']:.2f} s)"
        lines.append(f"{one['step']}  {_fault_of(one) if one['faults'] else 'valid'}  {took}")
        lines += [f"  {fault}" for fault in one["faults"]]
        damaged = damaged or bool(one["faults"])
    lines += [advice] if damaged else []
    return report, "\n".join(lines), FAULT if damaged else 0


def _show(args: argparse.Namespace) -> ActionResult:
    found = inspect.describe_checkpoint(*_requested_checkpoint(args))
    leaves = [("leaf", "is", "size", "fingerprint")]
    leaves += [
        (name, leaf["is"], format_bytes(leaf["bytes"]), leaf["fingerprint"])
        for name, leaf in found["leaves"].items()
    ]
    about = []
    for name, value in found["about"].items():
        if isinstance(value, dict) and "id" in value:  # the run's record: its config is beside it
            value = {key: entry for key, entry in value.items() if key != "config"}
        if name != "tree":
            about.append(f"{name}: {json.dumps(value)}")
    return found, "\n".join([f"{found['path']}", *about, "", _table(leaves)]), 0


def _diff(args: argparse.Namespace) -> ActionResult:
    one, other = (_requested_checkpoint(args, run) for run in (args.run, args.other))
    rows = inspect.diff_checkpoints(one, other)
    lines = [("leaf", "first", "second", "largest difference")]
    for row in rows:
        difference = "" if row["distance"] is None else f"{row['distance']:.6g}"
        lines.append((row["leaf"], *row["is"], difference))
    paths = [str(directory / str(step)) for directory, step in (one, other)]
    text = _table(lines) if rows else f"{paths[0]} and {paths[1]} hold the same state"
    return {"checkpoints": paths, "leaves": rows}, text, 0


def _rm(args: argparse.Namespace) -> ActionResult:
    directory, named = inspect.find_checkpoint(args.run)
    if args.damaged:
        removed, size = inspect.remove_damaged(directory)
        text = f"removed: {', '.join(removed) or 'none is damaged'}; {format_bytes(size)} freed"
        return {"removed": removed, "bytes": size}, text, 0
    if named is None and not args.step:
        raise UserError(
            f"jtrain ckpt rm: no step of {directory} is named. Write --step N, or --damaged for "
            f"all damaged ones; jtrain ckpt ls {args.run} lists them"
        )
    owner = _owner(directory)
    asked = named if named is not None else parse_step(args.step, "ckpt")
    step = asked if isinstance(asked, int) else inspect.resolve_step(directory, asked, owner)
    size = inspect.remove_checkpoints(directory, step, force=args.force, owner=owner)
    return {"step": step, "bytes": size}, f"{step} is removed: {format_bytes(size)} freed", 0


def _export(args: argparse.Namespace) -> ActionResult:
    directory, step = _requested_checkpoint(args)
    out = Path(args.out or f"{directory.parent.name}-{step}.safetensors")
    if out.suffix != ".safetensors":
        raise UserError(
            f"jtrain ckpt export: --out {out} is not a file of tensors, whose name ends in "
            f".safetensors. Write --out {out.with_suffix('.safetensors')}"
        )
    return *export_safetensors(directory, step, out, everything=args.all), 0


def _requested_checkpoint(args: argparse.Namespace, run: str = "") -> tuple[Path, int]:
    """Return the directory and the step of the requested checkpoint."""
    directory, named = inspect.find_checkpoint(run or args.run)
    if named is not None:
        return directory, named
    asked, owner = parse_step(args.step or "newest", "ckpt"), _owner(directory)
    return directory, inspect.resolve_step(directory, asked, owner)


def _owner(directory: Path) -> Any:
    """Return the run that owns a directory of checkpoints; None if no file names it."""
    return RunDir(directory.parent).owner()


def _fault_of(one: Mapping[str, Any]) -> str:
    return "OF ANOTHER RUN" if one.get("foreign") else "DAMAGED"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(align_columns(rows, right=()))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@contextlib.contextmanager
def fetch_arguments(args: argparse.Namespace) -> Iterator[None]:
    """Fetch addresses among the arguments, and replace them by local paths."""
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


def _list_copies(args: argparse.Namespace) -> ActionResult:
    objects, _ = _parse_address(args.run)
    rows = [
        {"step": step, "bytes": sum(sizes.values()), "sealed": seal.SEAL in sizes}
        for step, sizes in object_store_layout.object_sizes(objects).items()
    ]
    if not rows:
        raise object_store_layout.no_copy_error(objects)
    state = {True: "", False: "incomplete copy"}
    lines = [(f"{x['step']}", format_bytes(x["bytes"]), state[x["sealed"]]) for x in rows]
    return {"address": objects.address, "steps": rows}, _table(lines), 0


def _verify_copies(args: argparse.Namespace) -> ActionResult:
    objects, asked = _parse_address(args.run)
    every = object_store_layout.object_sizes(objects)
    if not every:
        raise object_store_layout.no_copy_error(objects)
    chosen = asked is not None or bool(args.step)
    steps = [_step(objects, asked, args.step)] if chosen else list(every)
    found = []
    for step in steps:
        start = time.perf_counter()
        with object_store_layout.temporary_copy(objects, step) as (_, faults):
            count = sum(every.get(step, {}).values())
        seconds = time.perf_counter() - start
        found.append({"step": step, "bytes": count, "seconds": seconds, "faults": faults})
    advice = "a run that is fetched takes the newest valid one"
    return _report_verified({"address": objects.address, "steps": found}, advice)


def _fetch_run(args: argparse.Namespace) -> ActionResult:
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
    folder = object_store_layout.CHECKPOINTS
    found = re.fullmatch(rf"(.*[^/:])/{folder}(?:/(\d+))?", address.rstrip("/"))
    run, step = found.groups() if found else (address, None)
    return ObjectStore(run), int(step) if step else None


def _step(objects: ObjectStore, named: int | None, word: str) -> int:
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


def _damaged(objects: ObjectStore, step: int, faults: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the copy of checkpoint {step} in {objects.address} is damaged: "
        f"{layout.summarize(faults)}. "
        f"To see which are valid: jtrain ckpt verify {objects.address}"
    )
