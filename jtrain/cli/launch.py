"""`jtrain launch --processes N VERB ...`: any verb in several processes, here or by an engine."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jtrain.cli import VERBS, manifests
from jtrain.cli.arguments import Arguments
from jtrain.distributed.launcher import launch
from jtrain.distributed.watchdog import Patience
from jtrain.errors import UserError
from jtrain.errors.spelling import did_you_mean


class Engine(NamedTuple):
    """An engine: what starts the processes."""

    module: str
    function: str
    """Called with the parsed arguments and the command: the words after the interpreter.

    `args.verb` is the verb, and `args.program` the words before it.
    """
    options: frozenset[str]
    """The options that it takes beside --engine and --processes."""


ENGINES = {
    "local": Engine(
        "jtrain.cli.launch",
        "launch_local",
        frozenset({"devices", "port", "restarts", "patience"}),
    ),
    "ray": Engine(
        "jtrain.cli.launch_ray",
        "launch_ray",
        frozenset({"devices", "restarts", "address", "env", "resources"}),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code of the first process that failed, or of all."""
    index = next((i for i, word in enumerate(argv) if word in VERBS), len(argv))
    parser = _arguments()
    args = parser.parse(argv[:index])
    args.verb, *rest = argv[index:] or [""]
    if args.command or args.verb in {"", "launch"}:
        raise UserError(_no_verb(next(iter(args.command), args.verb), args.processes))
    if args.engine in manifests.ENGINES:
        return manifests.print_manifest(args, argv[:index], [args.verb, *rest])
    for name, least in (("processes", 1), ("devices", 0), ("port", 0), ("restarts", 0)):
        if getattr(args, name) < least:
            raise UserError(f"jtrain launch: --{name} is at least {least}; type --{name} 2")
    engine = _engine(args, parser)
    manifests.check_no_options(argv[:index], args.engine)
    args.program = shlex.join(["jtrain", "launch", *argv[:index]])
    function = getattr(importlib.import_module(engine.module), engine.function)
    return function(args, ["-m", "jtrain", args.verb, *rest])


def launch_local(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the verb in processes on this machine."""
    return launch(
        [sys.executable, *command],
        processes=args.processes,
        devices=args.devices,
        port=args.port,
        restarts=args.restarts,
        patience=Patience.parse(args.patience),
        beats=args.verb == "run",
        program=args.program,
    )


def _engine(args: argparse.Namespace, parser: Arguments) -> Engine:
    """Return the engine, if it takes the options that were typed.

    Raises:
        UserError: if there is no such engine, or it does not take an option.
    """
    engine = ENGINES.get(args.engine)
    if engine is None:
        names = [*ENGINES, *manifests.ENGINES]
        meant = did_you_mean(args.engine, names) or "."
        raise UserError(
            f"jtrain launch: no engine {args.engine}; the engines are {', '.join(names)}{meant}"
        )
    others = set().union(*(other.options for other in ENGINES.values())) - engine.options
    for name in sorted(others):
        if getattr(args, name) != parser.get_default(name):
            takers = [key for key, other in ENGINES.items() if name in other.options]
            raise UserError(
                f"jtrain launch: the engine {args.engine} takes no --{name}; leave it out, or type "
                f"--engine {takers[0]}"
            )
    return engine


def _no_verb(word: str, processes: int) -> str:
    verbs = [name for name in VERBS if name != "launch"]
    config = word.endswith((".yaml", ".yml"))
    meant = f"; did you mean run {word}?" if config else did_you_mean(word, verbs) or "."
    found = f" {word} is not a verb that launch can run{meant}" if word else ""
    return (
        f"jtrain launch: the verb to run in {processes} processes is missing.{found} Write a verb "
        f"({', '.join(verbs)}): jtrain launch --processes 2 run configs/shakespeare.yaml"
    )


def _arguments() -> Arguments:
    parser = Arguments(
        "launch",
        "Run a verb in several processes on this machine, as several machines would run it: a\n"
        "rehearsal on CPU devices. The processes connect on the loopback only. When one fails or\n"
        "is stuck all are ended, and its output is printed last. With --restarts all are\n"
        "restarted, and a run resumes from its newest valid checkpoint. --engine ray trains\n"
        "by Ray Train on a Ray cluster; --engine k8s and others print a manifest, by which\n"
        "another program starts the processes elsewhere.",
        "--processes 2 --devices 4 run configs/shakespeare.yaml",
        "--processes 4 run configs/shakespeare.yaml parallel.kind=fsdp",
        "--processes 1 --restarts 3 run configs/shakespeare.yaml",
        "--engine ray --processes 4 --restarts 3 run configs/shakespeare.yaml",
        "--engine k8s --topology v5e:4x4 --image IMAGE --claim shared run configs/llama2_7b.yaml",
    )
    words = f"what starts the processes: {', '.join([*ENGINES, *manifests.ENGINES])}; default local"
    parser.add_argument("--engine", default="local", metavar="NAME", help=words)
    words = "number of processes; default 2"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=words)
    words = "CPU devices of each; default one, or the number in the config"
    parser.add_argument("--devices", type=int, default=0, metavar="N", help=words)
    words = "port of the first process on the loopback; default a free port"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=words)
    words = "restarts of all after one failed or was stuck; never after exit code 2"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=words)
    words = "seconds after which a process is stuck: 60 for all phases, or step=60,compile=600"
    parser.add_argument("--patience", default="", metavar="SECONDS", help=words)
    words = "ray: HOST:PORT of the cluster, auto or local; default RAY_ADDRESS, or local"
    parser.add_argument("--address", default="", metavar="ADDRESS", help=words)
    words = "ray: of each process, such as CPU=4,GPU=1; default a CPU, and a GPU if there are any"
    parser.add_argument("--resources", default="", metavar="NAME=N", help=words)
    words = "ray: names of further variables that the processes get from here"
    parser.add_argument("--env", default="", metavar="NAME,NAME", help=words)
    manifests.add_options(parser)
    words = "the verb to run in each, with its arguments"
    parser.add_argument("command", metavar="VERB ...", nargs="*", help=words)
    return parser
