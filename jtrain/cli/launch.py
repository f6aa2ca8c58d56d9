"""`jtrain launch --processes N VERB ...`: any verb in several processes on this machine."""

import shlex
import sys
from collections.abc import Sequence

from jtrain.cli import VERBS
from jtrain.cli.arguments import Arguments
from jtrain.config.suggestions import did_you_mean
from jtrain.distributed.heartbeat import Patience
from jtrain.distributed.heartbeat.fault import KINDS, Fault, parse_faults
from jtrain.distributed.launcher import launch
from jtrain.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs it; gives the exit code of the first process that failed, or that of all."""
    place = next((i for i, word in enumerate(argv) if word in VERBS), len(argv))
    typed = _arguments().parse(argv[:place])
    verb, *rest = argv[place:] or [""]
    if typed.command or verb in {"", "launch"}:
        raise UserError(_no_verb(next(iter(typed.command), verb), typed.processes))
    for name, least in (("processes", 1), ("devices", 0), ("port", 0), ("restarts", 0)):
        if getattr(typed, name) < least:
            raise UserError(f"jtrain launch: --{name} is at least {least}; type --{name} 2, say")
    command = [sys.executable, "-m", "jtrain", verb, *rest]
    return launch(
        command,
        processes=typed.processes,
        devices=typed.devices,
        port=typed.port,
        restarts=typed.restarts,
        patience=Patience.parse(typed.patience),
        beats=verb == "run",
        faults=_faults(typed.chaos, typed.processes, verb),
        typed=_typed(argv[:place]),
    )


def _typed(words: Sequence[str]) -> str:
    """What was typed before the verb, without faults: to go on they are not needed."""
    kept, skip = [], False
    for word in words:
        if not skip and word.partition("=")[0] != "--chaos":
            kept.append(word)
        skip = word == "--chaos"
    return shlex.join(["jtrain", "launch", *kept])


def _no_verb(word: str, processes: int) -> str:
    there = [name for name in VERBS if name != "launch"]
    config = word.endswith((".yaml", ".yml"))
    meant = f"; did you mean run {word}?" if config else did_you_mean(word, there) or "."
    found = f" {word} is no verb that it can run{meant}" if word else ""
    return (
        f"jtrain launch: what is to be run in {processes} processes?{found} It is a verb and what "
        f"follows it ({', '.join(there)}): jtrain launch --processes 2 run configs/shakespeare.yaml"
    )


def _faults(text: str, processes: int, verb: str) -> tuple[Fault, ...]:
    if text and verb != "run":
        raise UserError(
            f"jtrain launch: --chaos was asked for with {verb}, and only a run can be rehearsed: "
            f"jtrain launch --processes {processes} --chaos {text} run CONFIG"
        )
    return parse_faults(text, processes)


def _arguments() -> Arguments:
    parser = Arguments(
        "launch",
        "Runs a verb in several processes on this machine, as many machines would run it: a\n"
        "rehearsal on CPU devices. They reach one another on the loopback alone. When one fails\n"
        "or is stuck all are ended; its words come last. With --restarts they are begun again,\n"
        "and a run goes on from its last whole checkpoint.",
        "--processes 2 --devices 4 run configs/shakespeare.yaml",
        "--processes 4 run configs/shakespeare.yaml parallel.kind=fsdp",
        "--processes 1 --restarts 3 run configs/shakespeare.yaml",
        "--chaos kill:1@step20,stall:0@step30 --patience 10 run configs/shakespeare.yaml",
    )
    words = "how many processes"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=words)
    words = "CPU devices of each; without it one, or as many as the config says"
    parser.add_argument("--devices", type=int, default=0, metavar="N", help=words)
    words = "where the first one listens on the loopback; without it a port that is free"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=words)
    words = "how often all are begun again after one failed or was stuck; never after exit code 2"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=words)
    words = "what goes wrong in a rehearsal: " + ", ".join(KINDS) + "; a run gets over each, once"
    parser.add_argument("--chaos", default="", metavar="FAULTS", help=words)
    words = "after so long in a phase a process is stuck: 60 for all phases, or step=60,compile=600"
    parser.add_argument("--patience", default="", metavar="SECONDS", help=words)
    words = "what is run in each, with all that follows it"
    parser.add_argument("command", metavar="VERB ...", nargs="*", help=words)
    return parser
