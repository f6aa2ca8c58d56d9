"""`jtrain launch --processes N VERB ...`: any verb in several processes on this machine."""

import shlex
import sys
from collections.abc import Sequence

from jtrain.cli import VERBS, manifests
from jtrain.cli.arguments import Arguments
from jtrain.distributed.heartbeat import Patience
from jtrain.distributed.heartbeat.fault import KINDS, Fault, parse_faults
from jtrain.distributed.launcher import launch
from jtrain.errors import UserError
from jtrain.errors.spelling import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code of the first process that failed, or of all."""
    index = next((i for i, word in enumerate(argv) if word in VERBS), len(argv))
    args = _arguments().parse(argv[:index])
    verb, *rest = argv[index:] or [""]
    if args.command or verb in {"", "launch"}:
        raise UserError(_no_verb(next(iter(args.command), verb), args.processes))
    if args.engine in manifests.ENGINES:
        return manifests.print_manifest(args, argv[:index], [verb, *rest])
    if args.engine != "local":
        raise UserError(_no_engine(args.engine))
    manifests.check_local(argv[:index])
    for name, least in (("processes", 1), ("devices", 0), ("port", 0), ("restarts", 0)):
        if getattr(args, name) < least:
            raise UserError(f"jtrain launch: --{name} is at least {least}; type --{name} 2")
    command = [sys.executable, "-m", "jtrain", verb, *rest]
    return launch(
        command,
        processes=args.processes,
        devices=args.devices,
        port=args.port,
        restarts=args.restarts,
        patience=Patience.parse(args.patience),
        beats=verb == "run",
        faults=_faults(args.chaos, args.processes, verb),
        program=_without_chaos(argv[:index]),
    )


def _without_chaos(words: Sequence[str]) -> str:
    """Return the words before the verb without --chaos: a resumed run needs no faults."""
    words_to_keep, skip = [], False
    for word in words:
        if not skip and word.partition("=")[0] != "--chaos":
            words_to_keep.append(word)
        skip = word == "--chaos"
    return shlex.join(["jtrain", "launch", *words_to_keep])


def _no_verb(word: str, processes: int) -> str:
    verbs = [name for name in VERBS if name != "launch"]
    config = word.endswith((".yaml", ".yml"))
    meant = f"; did you mean run {word}?" if config else did_you_mean(word, verbs) or "."
    found = f" {word} is not a verb that launch can run{meant}" if word else ""
    return (
        f"jtrain launch: the verb to run in {processes} processes is missing.{found} Write a verb "
        f"({', '.join(verbs)}): jtrain launch --processes 2 run configs/shakespeare.yaml"
    )


def _no_engine(name: str) -> str:
    engines = ["local", *manifests.ENGINES]
    meant = did_you_mean(name, engines) or "."
    return f"jtrain launch: no engine {name}; the engines are {', '.join(engines)}{meant}"


def _faults(text: str, processes: int, verb: str) -> tuple[Fault, ...]:
    if text and verb != "run":
        raise UserError(
            f"jtrain launch: --chaos works only with the verb run, found {verb}: "
            f"jtrain launch --processes {processes} --chaos {text} run CONFIG"
        )
    return parse_faults(text, processes)


def _arguments() -> Arguments:
    parser = Arguments(
        "launch",
        "Run a verb in several processes on this machine, as several machines would run it: a\n"
        "rehearsal on CPU devices. The processes connect on the loopback only. When one fails or\n"
        "is stuck all are ended, and its output is printed last. With --restarts all are\n"
        "restarted, and a run resumes from its newest valid checkpoint. --engine k8s and others\n"
        "print a manifest, by which another program starts the processes elsewhere.",
        "--processes 2 --devices 4 run configs/shakespeare.yaml",
        "--processes 4 run configs/shakespeare.yaml parallel.kind=fsdp",
        "--processes 1 --restarts 3 run configs/shakespeare.yaml",
        "--chaos kill:1@step20,stall:0@step30 --patience 10 run configs/shakespeare.yaml",
        "--engine k8s --topology v5e:4x4 --image IMAGE --claim shared run configs/llama2_7b.yaml",
    )
    engines = ", ".join(["local", *manifests.ENGINES])
    words = f"what starts the processes: {engines}; default local, this machine"
    parser.add_argument("--engine", default="local", metavar="NAME", help=words)
    words = "number of processes"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=words)
    words = "CPU devices of each; default one, or the number in the config"
    parser.add_argument("--devices", type=int, default=0, metavar="N", help=words)
    words = "port of the first process on the loopback; default a free port"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=words)
    words = "restarts of all after one failed or was stuck; never after exit code 2"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=words)
    words = "faults to inject: " + ", ".join(KINDS) + "; each happens once"
    parser.add_argument("--chaos", default="", metavar="FAULTS", help=words)
    words = "seconds after which a process is stuck: 60 for all phases, or step=60,compile=600"
    parser.add_argument("--patience", default="", metavar="SECONDS", help=words)
    manifests.add_options(parser)
    words = "the verb to run in each, with its arguments"
    parser.add_argument("command", metavar="VERB ...", nargs="*", help=words)
    return parser
