"""Command line: one module a verb, imported when the verb is typed."""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from jtrain.cli.output import print_text as print
from jtrain.distributed.compiler_flags import check_environment
from jtrain.distributed.shutdown import ASKS, exit_alone
from jtrain.errors import DONE, FAULT, STOPPED, DeviceError, PeerError, UserError
from jtrain.errors.spelling import nearest_name
from jtrain.errors.user_code import refused_platform
from jtrain.io.disk_errors import disk_advice, may_pass
from jtrain.io.environment import jtrain_version
from jtrain.io.redact import redact
from jtrain.train.runtime import pause_collection

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# jtrain/cli/VERB.py has `main(argv) -> exit code`; the help lists the verbs under these headings.
GROUPS = {
    "Begin": {
        "init": "write a project of your own: an experiment, its config, its test",
        "doctor": "find what is wrong with this machine, before anything is trained",
    },
    "Know before you run": {
        "show": "print a config's values and the origin of each, or the help of a key",
        "data": "write text as token files; print rows of a config's batches",
        "check": "check that no split of a batch changes what a config trains",
        "museum": "print public defects of trainers, how large each is, and what check says of it",
        "explain": "print what a step computes, saves and sends, by module",
        "plan": "print the memory and collectives of a step on devices that are not here",
        "range": "suggest a learning rate, by a short run in which it grows",
    },
    "Train": {
        "run": "train a config, or resume a run that was stopped",
        "sweep": "run a config with several values, side by side, and rank them",
        "launch": "run any of these in several processes on this machine",
        "work": "add a worker to a running run on parameter servers",
    },
    "Use a trained model": {
        "eval": "evaluate a trained run",
        "predict": "write the outputs of a trained run for each row of a file",
        "sample": "write a text sampled from a trained run",
        "export": "write a trained model for other programs: transformers, safetensors, StableHLO",
        "eject": "write a config as one file of jax, optax and numpy, which takes the same steps",
        "ckpt": "look after checkpoints: ls, verify, show, diff, rm, export, fetch",
    },
    "Look back": {
        "report": "write one HTML page about some runs: curves, differences, speed, samples",
        "diff": "print where two runs diverge: the first step, number, batch and leaf",
        "replay": "recompute a step of a run, and compare its bits",
        "audit": "recompute steps drawn at random; write or check a signed certificate",
    },
}
VERBS = {verb: text for group in GROUPS.values() for verb, text in group.items()}
# They compute with JAX and leave the flags of the compiler as they are; run, plan and explain set
# flags, and check them then.
_COMPUTE = {
    "eval",
    "predict",
    "sample",
    "check",
    "museum",
    "range",
    "replay",
    "audit",
    "export",
    "eject",
    "work",
    "doctor",
}
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit code: 0 done, 2 a user error, 70 a fault."""
    words = sys.argv[1:] if argv is None else argv
    verb, *rest = words or ["--help"]
    try:
        return _run_verb(verb, rest)
    except (UserError, PeerError, DeviceError) as error:
        print(redact(str(error)), file=sys.stderr)
        return FAULT if may_pass(error) else error.code
    except SystemExit as stop:  # how argparse ends
        return stop.code if isinstance(stop.code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `jtrain show x.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        if isinstance(error, RuntimeError | AssertionError) and (advice := refused_platform(error)):
            print(advice, file=sys.stderr)
            return advice.code
        if isinstance(error, OSError) and error.filename and may_pass(error):
            words = disk_advice(error, error.filename).words
            print(f"{error.filename}: {error.strerror}. {words}, and run again.", file=sys.stderr)
            return FAULT
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return FAULT


def leave(code: int) -> NoReturn:
    """End the process with an exit code.

    Signals are ignored from here on. A failed process does not wait for its peers: JAX would wait
    300 s for them, and they hang.
    """
    for number in ASKS:
        signal.signal(number, signal.SIG_IGN)
    jax = sys.modules.get("jax")
    if code not in {DONE, STOPPED} and jax is not None and jax.distributed.is_initialized():
        exit_alone(code)
    sys.exit(code)


def _run_verb(verb: str, rest: list[str]) -> int:
    if verb in VERBS:
        # Imports leave no garbage, and looking for it takes a tenth longer.
        with pause_collection():
            module = importlib.import_module(f"jtrain.cli.{verb}")
        computes = verb in _COMPUTE or "--model" in rest
        if computes and not {"-h", "--help"} & set(rest):
            check_environment()
        code = module.main(rest)
        sys.stdout.flush()
        return code
    if verb in (others := _verbs_of_packages()):
        from jtrain.config.registry import load_address

        return load_address(others[verb].value).main(rest)
    if verb not in {"-h", "--help", "--version"}:
        raise UserError(_unknown_verb(verb))
    print(f"jtrain {jtrain_version()}" if verb == "--version" else _help())
    return DONE


def _verbs_of_packages() -> "dict[str, EntryPoint]":
    """Return the modules with `main(argv) -> exit code` that packages name in `jtrain.verbs`."""
    from importlib.metadata import entry_points  # 30 ms

    return {entry.name: entry for entry in entry_points(group="jtrain.verbs")}


def _help() -> str:
    others = {name: f"of {entry.value}" for name, entry in _verbs_of_packages().items()}
    groups = {**GROUPS, "Of other packages": others} if others else GROUPS
    width = max(map(len, [*VERBS, *others]))
    lines = []
    for heading, verbs in groups.items():
        lines += ["", heading, *(f"  {verb:{width}} {text}" for verb, text in verbs.items())]
    listed = "\n".join(lines)
    return f"""\
jtrain trains any pure JAX loss function on any number of devices.

  jtrain VERB CONFIG [KEY=VALUE ...]
  jtrain VERB --help
{listed}

For example: jtrain run configs/shakespeare.yaml steps=400 optimizer.lr=2e-3"""


def _unknown_verb(verb: str) -> str:
    if verb.endswith((".yaml", ".yml")):
        meant = f"; did you mean jtrain run {verb}?"
    else:
        near = nearest_name(verb, [*VERBS, *_verbs_of_packages()])
        meant = f"; did you mean {near}?" if near else ""
    return f"jtrain: {verb} is not a verb; the verbs are {', '.join(VERBS)}{meant}"
