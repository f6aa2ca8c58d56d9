"""`jtrain ckpt ls | verify | show | diff | rm | export | fetch`: inspection of checkpoints."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jtrain.cli.arguments import Arguments, parse_step
from jtrain.cli.output import print_text as print
from jtrain.errors import FAULT, CheckpointError, UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.formatting import format_bytes
from jtrain.io.object_store import check_local_path

Found: TypeAlias = tuple[Any, str, int]  # for --json, for a person, the exit code
DOES = {
    "ls": "list the steps, their sizes, which is newest and best, and which are damaged",
    "verify": "read every byte and compare it with the seal",
    "show": "print the leaves of a checkpoint and its record",
    "diff": "print the leaves that differ between two checkpoints, and by how much",
    "rm": "remove a step, or the damaged ones; never the last valid one unless --force",
    "export": "write the parameters as a .safetensors file",
    "fetch": "fetch a run from an object store, to runs/NAME",
}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; return the exit code, 70 if a checkpoint is damaged."""
    action, *rest = argv or ["--help"]
    if action in {"-h", "--help"}:
        print("\n".join(f"jtrain ckpt {name:7} {what}" for name, what in DOES.items()))
        return 0
    if action not in DOES:
        raise UserError(
            f"jtrain ckpt: {action} is not one of {', '.join(DOES)}{did_you_mean(action, DOES)}; "
            f"write jtrain ckpt ls RUN"
        )
    args = arguments_of(action).parse(rest)

    check_local_path(getattr(args, "out", ""), f"jtrain ckpt {action}: --out")

    import jax

    jax.config.update("jax_platforms", "cpu")  # leave the accelerator to a run that may be training
    names = {"ls": _ls, "verify": _verify, "show": _show, "diff": _diff, "rm": _rm}
    actions: Mapping[str, Callable[[argparse.Namespace], Found]] = {**names, "export": _export}
    from jtrain.cli import stored

    done = stored.run_action(action, args)
    with stored.fetch_arguments(args) if done is None else contextlib.nullcontext():
        found, text, code = done or actions[action](args)
    print(json.dumps(found) if args.json else text)
    return code


def _ls(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import directory_entries, inspect

    directory, _ = _find(args.run)
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
    notes = _stray_notes(directory)
    found = {
        "directory": str(directory),
        "steps": rows,
        "damaged": [path.name for path in aside if directory_entries.DAMAGED in path.name],
        "foreign": [path.name for path in aside if directory_entries.FOREIGN in path.name],
        "notes": notes,
    }
    return found, "\n".join([_columns(lines), *notes]), 0


def _verify(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import inspect, layout

    directory, named = _find(args.run)
    asked = named if named is not None else parse_step(args.step, "ckpt") if args.step else None
    owner = _owner(directory)
    if asked is None:
        steps = layout.list_named_steps(directory)
    else:
        steps = [inspect.resolve_step(directory, asked, owner)]
    found = [inspect.verify(directory, step, owner) for step in steps]
    lines = []
    for one in found:
        took = f"({format_bytes(one['bytes'])} in {one['seconds']:.2f} s)"
        lines.append(f"{one['step']}  {_fault_of(one) if one['faults'] else 'valid'}  {took}")
        lines += [f"  {fault}" for fault in one["faults"]]
    damaged = any(one["faults"] for one in found)
    if damaged:
        lines.append(
            "jtrain run resumes from the newest valid one, and sets damaged ones aside; to "
            f"remove them: jtrain ckpt rm {directory} --damaged"
        )
    notes = _stray_notes(directory) if asked is None else []
    report = {"directory": str(directory), "steps": found, "notes": notes}
    return report, "\n".join([*lines, *notes]), FAULT * (damaged or bool(notes))


def _show(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import inspect

    found = inspect.describe_checkpoint(*_one(args))
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
    return found, "\n".join([f"{found['path']}", *about, "", _columns(leaves)]), 0


def _diff(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import inspect

    one, other = (_one(args, run) for run in (args.run, args.other))
    rows = inspect.diff_checkpoints(one, other)
    lines = [("leaf", "first", "second", "largest difference")]
    for row in rows:
        difference = "" if row["distance"] is None else f"{row['distance']:.6g}"
        lines.append((row["leaf"], *row["is"], difference))
    paths = [str(directory / str(step)) for directory, step in (one, other)]
    text = _columns(lines) if rows else f"{paths[0]} and {paths[1]} hold the same state"
    return {"checkpoints": paths, "leaves": rows}, text, 0


def _rm(args: argparse.Namespace) -> Found:
    from jtrain.checkpoint import inspect

    directory, named = _find(args.run)
    if args.damaged:
        removed, size = inspect.remove_damaged(directory)
        text = f"removed: {', '.join(removed) or 'none is damaged'}; {format_bytes(size)} freed"
        return {"removed": removed, "bytes": size}, text, 0
    if named is None and not args.step:
        raise UserError(
            f"jtrain ckpt rm: no step of {directory} is named. Write --step N, or --damaged for "
            f"all damaged ones; jtrain ckpt ls {args.run} lists them"
        )
    step = named
    if step is None:
        asked = parse_step(args.step, "ckpt")
        step = asked if isinstance(asked, int) else inspect.resolve_step(directory, asked)
    size = inspect.remove_checkpoints(directory, step, force=args.force, owner=_owner(directory))
    return {"step": step, "bytes": size}, f"{step} is removed: {format_bytes(size)} freed", 0


def _export(args: argparse.Namespace) -> Found:
    from jtrain.cli.export import export_safetensors

    directory, step = _one(args)
    out = Path(args.out or f"{directory.parent.name}-{step}.safetensors")
    if out.suffix != ".safetensors":
        raise UserError(
            f"jtrain ckpt export: --out {out} is no file of tensors, whose name ends in "
            f".safetensors. Write --out {out.with_suffix('.safetensors')}"
        )
    return *export_safetensors(directory, step, out, everything=args.all), 0


def _one(args: argparse.Namespace, run: str = "") -> tuple[Path, int]:
    """Return the directory and the step of the requested checkpoint."""
    from jtrain.checkpoint import inspect

    directory, named = _find(run or args.run)
    if named is not None:
        return directory, named
    asked, owner = parse_step(args.step or "newest", "ckpt"), _owner(directory)
    return directory, inspect.resolve_step(directory, asked, owner)


def _owner(directory: Path) -> Any:
    """Return the run that owns a directory of checkpoints; None if no file names it."""
    from jtrain.train.run_dir import RunDir

    return RunDir(directory.parent).owner()


def _stray_notes(directory: Path) -> list[str]:
    """Return a line for each checkpoint under an invalid name."""
    from jtrain.checkpoint import directory_entries

    return [
        f"{name} holds checkpoint {step}, but its name is not a step: a run ignores it. To restore "
        f"it: mv {directory / name} {directory / str(step)}"
        for name, step in directory_entries.list_strays(directory)
    ]


def _fault_of(one: Mapping[str, Any]) -> str:
    return "OF ANOTHER RUN" if one["foreign"] else "DAMAGED"


def _find(run: str) -> tuple[Path, int | None]:
    """Return the directory of the requested checkpoints, and the step if a path names one."""
    from jtrain.checkpoint import directory_entries, inspect
    from jtrain.train.run_dir import RunDir

    try:
        return inspect.find_checkpoint(run)
    except directory_entries.OutsideError:
        raise
    except CheckpointError:
        for run_dir in map(RunDir, (Path(run), inspect.RUNS / run)):
            if run_dir.config.is_file():
                status = run_dir.facts()
                known = {"status", "step"} <= status.keys()
                at = f" ({status['status']} at step {status['step']})" if known else ""
                raise CheckpointError(
                    f"{run_dir.path} has no checkpoint{at}: {run_dir.resume_command} resumes it"
                ) from None
        raise


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def arguments_of(action: str) -> Arguments:
    """Return a parser of the arguments of a subcommand."""
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
        "diff": "\nThe exit code is always 0; with --json, `leaves` is empty if none differs.",
        "verify": "\nThe exit code is 70 if a checkpoint is damaged.",
    }
    help_text = f"{DOES[action].capitalize()}.{codes.get(action, '')}"
    parser = Arguments(f"ckpt {action}", help_text, *examples[action])
    run = "a run, its name in runs/, the path of a checkpoint, or s3://bucket/runs/NAME"
    parser.add_argument("run", metavar="RUN", help=run)
    if action == "diff":
        parser.add_argument("other", metavar="RUN", help="the run to compare with")
    if action != "ls":
        step = "newest, best or a number; default all" if action == "verify" else ""
        step = step or ("newest, best or a number" + " (default newest)" * (action != "rm"))
        parser.add_argument("--step", default="", help=step)
    if action == "rm":
        force = "remove the last valid one too"
        parser.add_argument("--force", action="store_true", help=force)
        damaged = "remove all that verify finds damaged, and damaged ones that were set aside"
        parser.add_argument("--damaged", action="store_true", help=damaged)
    if action == "export":
        out = "the file; default RUN-STEP.safetensors in the working directory"
        parser.add_argument("--out", metavar="FILE", default="", help=out)
        everything = "export the optimizer's state and the keys too"
        parser.add_argument("--all", action="store_true", help=everything)
    if action == "fetch":
        out = "the run's directory; default runs/NAME"
        parser.add_argument("--out", metavar="DIRECTORY", default="", help=out)
    parser.add_json()
    return parser
