"""`jtrain run CONFIG`: train, or go on where it was stopped."""

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.config.node import TYPED
from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.config.top import names_a_directory
from jtrain.distributed.cluster.command_line import program
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import DONE, FAULT, STOPPED, ConfigError, UserError

CODES = {"done": DONE, "failed": FAULT, "stopped": STOPPED}


def main(argv: Sequence[str]) -> int:
    """Trains; gives the exit code: 0 done, 70 a fault, 75 stopped: run it again to go on."""
    HEARTBEAT.phase("start")
    typed = _arguments().parse(argv)
    resolved = resolve(Path(typed.config), typed.settings)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    if looking := _looking(typed):
        return looking(resolved)
    _refuse_a_copy(resolved)

    from jtrain.cli.run_summary import ending
    from jtrain.train.run import run

    outcome = run(resolved.config, source=resolved.path)
    if outcome.directory.first:
        typed = f"{program()} run {shlex.join(argv)}"
        print(ending(outcome, resolved.config, resolved.path, typed))
    return CODES[outcome.status]


def _refuse_a_copy(resolved: ResolvedConfig) -> None:
    """Refuses the config in a run's directory that was copied or moved: it names another run."""
    path, name = resolved.path, resolved.config.name
    there, meant = path.parent.resolve(), Path("runs", name).resolve()
    typed = resolved.origins["name"].layer == TYPED
    if typed or path.name != "config.yaml" or there == meant or not _holds_a_run(there):
        return
    other = shlex.join(["jtrain", "run", str(path), f"name={name}-2"])
    raise ConfigError(
        f"{path} belongs to a run and names {name}, which would be runs/{name}, and it lies "
        f"elsewhere: the run was copied or moved, or is one of another directory.\n"
        f"To go on with that one: {_go_on(there)}\n"
        f"To start another run with its values: {other}"
    )


def _holds_a_run(there: Path) -> bool:
    """Whether a directory holds a run beside its config: run.json may be lost, or checkpoints."""
    return any(os.path.lexists(there / name) for name in ("run.json", "checkpoints", "steps.jsonl"))


def _go_on(there: Path) -> str:
    """What goes on with the run in a directory, whatever its config calls it."""
    runs = next((above for above in there.parents if above.name == "runs"), None)
    own = str(there.relative_to(runs)) if runs else ""
    if runs is None or not names_a_directory(own):
        own, go = "NAME", "move it to runs/NAME, and type "
    else:
        home = runs.parent == Path.cwd().resolve()
        go = "" if home else f"cd {shlex.quote(str(runs.parent))} && "
    return f"{go}jtrain run {shlex.quote(f'runs/{own}/config.yaml')} {shlex.quote(f'name={own}')}"


def _looking(typed: argparse.Namespace) -> Callable[[ResolvedConfig], int] | None:
    """What is to be done in the place of training, if anything."""
    asked = {
        "--fast": _fast if typed.fast else None,
        "--overfit": functools.partial(_overfit, typed.overfit)
        if typed.overfit is not None
        else None,
        "--eager": _eager if typed.eager else None,
        "--find-nan": _find_nan if typed.find_nan else None,
    }
    chosen = [name for name, does in asked.items() if does]
    if len(chosen) > 1:
        raise UserError(f"jtrain run: {' and '.join(chosen)} are two things; type one of them")
    return asked[chosen[0]] if chosen else None


def _fast(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.dry_run import fast

    done = fast(resolved.config, tell=_tell)
    print(f"all of it works, {sum(stage.seconds for stage in done):.1f} s; nothing is left of it")
    return DONE


def _overfit(batches: int, resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.overfit import overfit

    found = overfit(resolved.config, batches, tell=_tell)
    print(found.told())
    return DONE if found.small else FAULT


def _eager(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.eager import eager

    eager(resolved.config, tell=_tell)
    return DONE


def _find_nan(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.find_nan import find_nan

    found = find_nan(resolved.config, tell=_tell)
    if found is None:
        return DONE
    print(found.told())
    return FAULT


def _tell(line: str) -> None:
    print(line, flush=True)


def _arguments() -> Arguments:
    parser = Arguments(
        "run",
        "Trains what a config says, in runs/NAME. The same command goes on with a run that was\n"
        "stopped or killed, bit for bit; on a finished one it says so, and with more steps= it\n"
        "trains it longer.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml steps=400 name=try optimizer.lr=1e-3",
        "configs/shakespeare.yaml parallel.kind=fsdp parallel.devices=4",
        "runs/shakespeare/config.yaml steps=2000",
        "configs/shakespeare.yaml --fast",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    words = "values to change, such as optimizer.lr=1e-3"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    words = "a few steps of all that the run will do, and how long each part takes; leaves nothing"
    parser.add_argument("--fast", action="store_true", help=words)
    words = "train on the first N batches again and again: can it learn them by heart?"
    parser.add_argument("--overfit", metavar="N", type=int, help=words)
    words = "steps without jit, so that prints and breakpoints in the loss see numbers"
    parser.add_argument("--eager", action="store_true", help=words)
    words = "where the first value that is not finite comes from: operation, line, leaf, rows"
    parser.add_argument("--find-nan", action="store_true", help=words)
    return parser
