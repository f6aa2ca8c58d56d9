"""`jtrain run CONFIG`: train a config, or resume a stopped run."""

import argparse
import functools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, print_line, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.config.node import TYPED
from jtrain.config.resolve import ResolvedConfig
from jtrain.config.top import is_run_name
from jtrain.distributed.cluster.cluster import command_words
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import DONE, FAULT, STOPPED, ConfigError, UserError

CODES = {"done": DONE, "failed": FAULT, "stopped": STOPPED}


def main(argv: Sequence[str]) -> int:
    """Train; return the exit code: 0 done, 70 a fault, 75 stopped (run it again to resume)."""
    HEARTBEAT.begin_process()
    args = _arguments().parse(argv)
    resolved = resolve_config(args.config, args.settings)
    if debug := _debug_mode(args):
        return debug(resolved)
    _check_not_copied(resolved)

    from jtrain.parallel import Server

    if isinstance(resolved.config.parallel, Server):
        from jtrain.server.process import serve_as_task

        code = serve_as_task(resolved.config, os.environ, print_error)
        if code is not None:
            return code

    from jtrain.cli.run_summary import format_summary, open_profile, print_profile
    from jtrain.train.run import run

    profile = open_profile(args.profile, resolved.config) if args.profile else None
    hooks = [profile] if profile else []
    outcome = run(resolved.config, source=resolved.path, hooks=hooks)
    if outcome.directory.first:
        command = f"{command_words()} run {shlex.join(argv)}"
        print(format_summary(outcome, resolved.config, resolved.path, command, args.settings))
    if profile:
        print_profile(profile, resolved.config, outcome)
    return CODES[outcome.status]


def _check_not_copied(resolved: ResolvedConfig) -> None:
    """Raise if the config lies in a copied or moved run directory: it names another run."""
    path, name = resolved.path, resolved.config.name
    directory, named = path.parent.resolve(), Path("runs", name).resolve()
    # The run may have lost files.
    files = (directory / file for file in ("run.json", "checkpoints", "steps.jsonl"))
    is_copy = path.name == "config.yaml" and directory != named and any(map(os.path.lexists, files))
    if not is_copy or resolved.origins["name"].layer == TYPED:
        return
    other = shlex.join(["jtrain", "run", str(path), f"name={name}-2"])
    raise ConfigError(
        f"{path} belongs to a run named {name}, whose directory is runs/{name}, and the file lies "
        f"elsewhere: the run was copied or moved, or belongs to another working directory.\n"
        f"To resume that run: {_resume_command(directory)}\n"
        f"To start another run with its values: {other}"
    )


def _resume_command(directory: Path) -> str:
    """Return the command that resumes the run in a directory, whatever its config names it."""
    runs = next((parent for parent in directory.parents if parent.name == "runs"), None)
    own = str(directory.relative_to(runs)) if runs else ""
    if runs is None or not is_run_name(own):
        own, prefix = "NAME", "move it to runs/NAME, and type "
    else:
        home = runs.parent == Path.cwd().resolve()
        prefix = "" if home else f"cd {shlex.quote(str(runs.parent))} && "
    config, name = shlex.quote(f"runs/{own}/config.yaml"), shlex.quote(f"name={own}")
    return f"{prefix}jtrain run {config} {name}"


def _debug_mode(args: argparse.Namespace) -> Callable[[ResolvedConfig], int] | None:
    """Return the function that replaces training, if an option asks for one."""
    overfit = functools.partial(_overfit, args.overfit)
    modes = {"--fast": _fast, "--overfit": overfit, "--eager": _eager, "--find-nan": _find_nan}
    typed = (args.fast, args.overfit is not None, args.eager, args.find_nan)
    chosen = [name for name, is_typed in zip(modes, typed, strict=True) if is_typed]
    named = [*chosen, *(["--profile"] if args.profile and chosen else [])]
    if len(named) > 1:
        raise UserError(f"jtrain run: {' and '.join(named)} exclude each other; type one of them")
    return modes[chosen[0]] if chosen else None


def _fast(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.rehearsals import dry_run

    dry_run(resolved.config, log=print_line)
    print("everything works; no files were left")
    return DONE


def _overfit(batches: int, resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.rehearsals import overfit

    found = overfit(resolved.config, batches, log=print_line)
    print(found.describe())
    return DONE if found.small else FAULT


def _eager(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.single_device import run_eager

    run_eager(resolved.config, log=print_line)
    return DONE


def _find_nan(resolved: ResolvedConfig) -> int:
    from jtrain.inspect.debug.find_nan import find_nan

    found = find_nan(resolved.config, log=print_line)
    if found is None:
        return DONE
    print(found.describe())
    return FAULT


def _arguments() -> Arguments:
    parser = Arguments(
        "run",
        "Train a config in runs/NAME. The same command resumes a run that was stopped or killed,\n"
        "bit for bit. A finished run stays as it is, unless steps= is larger: then it trains\n"
        "longer.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml steps=400 name=try optimizer.lr=1e-3",
        "configs/shakespeare.yaml parallel.kind=fsdp parallel.devices=4",
        "runs/shakespeare/config.yaml steps=2000",
        "configs/shakespeare.yaml --fast",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    words = "values to change, such as optimizer.lr=1e-3"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    words = "run a few steps of every stage of the run and time each; writes nothing"
    parser.add_argument("--fast", action="store_true", help=words)
    words = "train on the first N batches repeatedly: can the model memorize them?"
    parser.add_argument("--overfit", metavar="N", type=int, help=words)
    words = "train without jit, so that prints and breakpoints in the loss see numbers"
    parser.add_argument("--eager", action="store_true", help=words)
    words = "find the origin of the first value that is not finite: operation, line, leaf, rows"
    parser.add_argument("--find-nan", action="store_true", help=words)
    words = "trace these steps, and print where the time of the devices and of the host went"
    parser.add_argument("--profile", metavar="FIRST:LAST", default="", help=words)
    return parser
