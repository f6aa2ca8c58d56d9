"""`jtrain ckpt ls | verify | show | diff | rm | export | fetch`: checkpoints, looked at."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import asked_step
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import FAULT, CheckpointError, ConfigError, UserError
from jtrain.io.object_store import check_local_path

DOES = {
    "ls": "list the steps, their sizes, which is newest and best, and which are damaged",
    "verify": "read every byte and say what is not as it was sealed",
    "show": "print the leaves of a checkpoint and what was said about it",
    "diff": "name the leaves that differ between two checkpoints, and by how much",
    "rm": "remove a step, or the damaged ones; never the last whole one unless --force",
    "export": "write the parameters as a .safetensors file",
    "fetch": "bring a run back from an object store, to runs/NAME",
}


def main(argv: Sequence[str]) -> int:
    """Does what was asked; gives the exit code, 70 where a checkpoint is damaged."""
    does, *rest = argv or ["--help"]
    if does in {"-h", "--help"}:
        print("\n".join(f"jtrain ckpt {name:7} {what}" for name, what in DOES.items()))
        return 0
    if does not in DOES:
        raise UserError(
            f"jtrain ckpt: {does} is none of {', '.join(DOES)}{did_you_mean(does, DOES)}; "
            f"write jtrain ckpt ls RUN"
        )
    typed = _arguments_of(does).parse(rest)

    check_local_path(getattr(typed, "out", ""), f"jtrain ckpt {does}: --out")

    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the run that may train
    acts: Mapping[str, Callable[[argparse.Namespace], tuple[Any, str, int]]] = {
        "ls": _ls,
        "verify": _verify,
        "show": _show,
        "diff": _diff,
        "rm": _rm,
        "export": _export,
    }
    from jtrain.cli import stored

    done = stored.act(does, typed)
    with stored.copied(typed) if done is None else contextlib.nullcontext():
        found, text, code = done or acts[does](typed)
    print(json.dumps(found) if typed.json else text)
    return code


def _ls(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import directory_entries, inspect

    directory, _ = _find(typed.run)
    owner, notes = _owner(directory)
    rows, aside = inspect.list_checkpoints(directory, owner), directory_entries.asides(directory)
    lines = [("step", "size", "saved", "", "")]
    for row in rows:
        best = row["best"]
        said = f"{best['name']} {best['value']:.6g}" if best.get("value") is not None else ""
        marks = ", ".join(row["marks"])
        state = f"{_fault_of(row)}: {row['faults'][0]}" if row["faults"] else marks
        lines.append((str(row["step"]), _size(row["bytes"]), _when(row["seconds"]), said, state))
    for path in aside:
        size, when = _size(inspect.num_bytes(path)), _when(path.stat().st_mtime)
        damaged = directory_entries.DAMAGED in path.name
        how = "set aside; to remove: ckpt rm --damaged" if damaged else "set aside: of another run"
        lines.append((path.name, size, when, "", how))
    notes += _strays(directory)
    found = {
        "directory": str(directory),
        "steps": rows,
        "damaged": [path.name for path in aside if directory_entries.DAMAGED in path.name],
        "foreign": [path.name for path in aside if directory_entries.FOREIGN in path.name],
        "notes": notes,
    }
    return found, "\n".join([_columns(lines), *notes]), 0


def _verify(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import inspect, layout

    directory, named = _find(typed.run)
    asked = named if named is not None else asked_step(typed.step, "ckpt") if typed.step else None
    owner, notes = _owner(directory)
    every = layout.named_steps(directory)
    steps = every if asked is None else [inspect.step_of(directory, asked, owner)]
    found = [inspect.verify(directory, step, owner) for step in steps]
    lines = []
    for one in found:
        told = "whole" if one["sealed"] else "whole by its sizes: it was saved before seals were"
        took = f"({_size(one['bytes'])} in {one['seconds']:.2f} s)"
        lines.append(f"{one['step']}  {_fault_of(one) if one['faults'] else told}  {took}")
        lines += [f"  {fault}" for fault in one["faults"]]
    damaged = any(one["faults"] for one in found)
    if damaged:
        lines.append(
            "jtrain run goes on from the newest that is whole, and sets damaged ones aside; to "
            f"remove them: jtrain ckpt rm {directory} --damaged"
        )
    if asked is None:
        notes += [*_strays(directory), *_gone(directory, every)]
    told = {"directory": str(directory), "steps": found, "notes": notes}
    return told, "\n".join([*lines, *notes]), FAULT * (damaged or bool(notes))


def _show(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import inspect

    found = inspect.describe_checkpoint(*_one(typed))
    leaves = [("leaf", "is", "size", "fingerprint")]
    leaves += [
        (name, leaf["is"], _size(leaf["bytes"]), leaf["fingerprint"])
        for name, leaf in found["leaves"].items()
    ]
    about = [f"{name}: {json.dumps(_brief(value))}" for name, value in found["about"].items()]
    return found, "\n".join([f"{found['path']}", *about, "", _columns(leaves)]), 0


def _brief(value: Any) -> Any:
    """What is said of the run, without its config, which is shown beside it."""
    if isinstance(value, dict) and {"id", "config"} <= value.keys():
        return {name: each for name, each in value.items() if name != "config"}
    return value


def _diff(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import inspect

    one, other = (_one(typed, run) for run in (typed.run, typed.other))
    rows = inspect.diff_checkpoints(one, other)
    lines = [("leaf", "here", "there", "largest difference")]
    for row in rows:
        apart = "" if row["apart"] is None else f"{row['apart']:.6g}"
        lines.append((row["leaf"], *row["is"], apart))
    paths = [str(directory / str(step)) for directory, step in (one, other)]
    text = _columns(lines) if rows else f"{paths[0]} and {paths[1]} hold the same state"
    return {"checkpoints": paths, "leaves": rows}, text, 0


def _rm(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import inspect

    directory, named = _find(typed.run)
    if typed.damaged:
        gone, size = inspect.remove_damaged(directory)
        told = f"removed: {', '.join(gone) or 'none is damaged'}; {_size(size)} are free again"
        return {"removed": gone, "bytes": size}, told, 0
    if named is None and not typed.step:
        raise UserError(
            f"jtrain ckpt rm: which step of {directory}? Write --step N, or --damaged for all "
            f"that are; jtrain ckpt ls {typed.run} lists them"
        )
    step = named
    if step is None:
        asked = asked_step(typed.step, "ckpt")
        step = asked if isinstance(asked, int) else inspect.step_of(directory, asked)
    size = inspect.remove_checkpoints(
        directory, step, force=typed.force, owner=_owner(directory)[0]
    )
    return {"step": step, "bytes": size}, f"{step} is removed: {_size(size)} are free again", 0


def _export(typed: argparse.Namespace) -> tuple[Any, str, int]:
    from jtrain.checkpoint import export, inspect, layout

    directory, step = _one(typed)
    layout.check(directory, step)
    leaves = layout.record(directory, step)["leaves"]
    names = export.names(leaves, typed.all)
    if not names:
        raise UserError(
            f"jtrain ckpt export: {directory / str(step)} has no leaf params/..., only "
            f"{', '.join(list(leaves)[:5])}; write --all for every leaf"
        )
    read = inspect.read_arrays(directory, step, list(names.values()))
    tensors = {called: read[name] for called, name in names.items()}
    out = Path(typed.out or f"{directory.parent.name}-{step}.safetensors")
    size = export.write(out, tensors, {"step": str(step), "from": str(directory), "format": "np"})
    found = {"out": str(out), "step": step, "tensors": len(tensors), "bytes": size}
    return found, f"{out}: {len(tensors)} tensors of step {step}, {_size(size)}", 0


def _one(typed: argparse.Namespace, run: str = "") -> tuple[Path, int]:
    """The one checkpoint that is meant."""
    from jtrain.checkpoint import inspect

    directory, named = _find(run or typed.run)
    if named is not None:
        return directory, named
    asked, owner = asked_step(typed.step or "newest", "ckpt"), _owner(directory)[0]
    return directory, inspect.step_of(directory, asked, owner)


def _owner(directory: Path) -> tuple[Any, list[str]]:
    """The run that the checkpoints in a directory should be of, and what is wrong where none is."""
    from jtrain.train.run_record import find_owner

    try:
        return find_owner(directory.parent), []
    except ConfigError as error:
        return None, [str(error)]


def _strays(directory: Path) -> list[str]:
    """A line for each checkpoint under a name that is none."""
    from jtrain.checkpoint import directory_entries

    return [
        f"{name} holds checkpoint {step} and has no name of one: a run does not see it. To give it "
        f"back: mv {directory / name} {directory / str(step)}"
        for name, step in directory_entries.strays(directory)
    ]


def _gone(directory: Path, steps: Sequence[int]) -> list[str]:
    """A line where run.json names a checkpoint that is not there."""
    from jtrain.checkpoint import directory_entries
    from jtrain.train.run_dir import RunDir

    there = RunDir(directory.parent)
    stands = there.stands() if directory == there.checkpoints else {}
    step = stands.get("step", 0)
    if not step or step in steps or stands.get("status") not in {"running", "stopped", "done"}:
        return []
    known = {path.name.partition(".")[0] for path in directory_entries.asides(directory)}
    if str(step) in known:
        return []
    return [f"{step} is gone: {there.status} says that the run has saved it"]


def _fault_of(one: Mapping[str, Any]) -> str:
    return "OF ANOTHER RUN" if one["foreign"] else "DAMAGED"


def _find(run: str) -> tuple[Path, int | None]:
    """The directory of the checkpoints that are meant, and the step if it is one of them."""
    from jtrain.checkpoint import directory_entries, inspect
    from jtrain.train.run_dir import RunDir

    try:
        return inspect.find_checkpoint(run)
    except directory_entries.OutsideError:
        raise
    except CheckpointError:
        for there in map(RunDir, (Path(run), inspect.RUNS / run)):
            if there.config.is_file():
                said = there.stands()
                known = {"status", "step"} <= said.keys()
                at = f" ({said['status']} at step {said['step']})" if known else ""
                raise CheckpointError(
                    f"{there.path} has no checkpoint{at}: {there.again} goes on with it"
                ) from None
        raise


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _size(count: int) -> str:
    from jtrain.checkpoint.disk_space import size

    return size(count)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _arguments() -> Arguments:
    """What may follow `jtrain ckpt`, of any kind."""
    return _Any("ckpt", "\n".join(DOES.values()))


class _Any(Arguments):
    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        does, *rest = argv
        return _arguments_of(does).parse(rest)


def _arguments_of(does: str) -> Arguments:
    examples = {
        "ls": ("shakespeare",),
        "verify": ("shakespeare", "runs/shakespeare/checkpoints/400"),
        "show": ("shakespeare --step best",),
        "diff": ("shakespeare shakespeare-2", "runs/a/checkpoints/100 runs/a/checkpoints/200"),
        "rm": ("shakespeare --step 200", "shakespeare --damaged"),
        "export": ("shakespeare --step best --out shakespeare.safetensors",),
        "fetch": ("s3://bucket/runs/shakespeare",),
    }
    codes = {
        "diff": "\nExit code 0 whether they differ or not; with --json, `leaves` is empty if not.",
        "verify": "\nExit code 70 where one is damaged.",
    }
    parser = Arguments(f"ckpt {does}", f"To {DOES[does]}.{codes.get(does, '')}", *examples[does])
    run = "a run, its name in runs/, the path of a checkpoint, or s3://bucket/runs/NAME"
    parser.add_argument("run", metavar="RUN", help=run)
    if does == "diff":
        parser.add_argument("other", metavar="RUN", help="another")
    if does != "ls":
        step = "newest, best or a number; all of them if not said" if does == "verify" else ""
        step = step or ("newest, best or a number" + " (default newest)" * (does != "rm"))
        parser.add_argument("--step", default="", help=step)
    if does == "rm":
        force = "the last whole one too"
        parser.add_argument("--force", action="store_true", help=force)
        damaged = "all that verify finds damaged, and those that were set aside because they were"
        parser.add_argument("--damaged", action="store_true", help=damaged)
    if does == "export":
        out = "the file; RUN-STEP.safetensors where you are if not said"
        parser.add_argument("--out", metavar="FILE", default="", help=out)
        everything = "the optimizer's state and the keys too"
        parser.add_argument("--all", action="store_true", help=everything)
    if does == "fetch":
        out = "the run's directory; runs/NAME if not said"
        parser.add_argument("--out", metavar="DIRECTORY", default="", help=out)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
