"""The command line: one file a verb, imported when it is asked for."""

import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from jtrain.distributed.heartbeat.exit_alone import exit_alone
from jtrain.distributed.heartbeat.shutdown_request import ASKS
from jtrain.errors import DONE, FAULT, STOPPED, DeviceError, PeerError, UserError
from jtrain.errors.user_code import refused_platform
from jtrain.io.redact import redact

# jtrain/cli/VERB.py has `main(argv) -> exit code`.
VERBS = {
    "run": "train what a config says, or go on where it was stopped",
    "eval": "evaluate a run that was trained",
    "predict": "write what a run that was trained makes of each row of a file",
    "sample": "write a text as a run that was trained would",
    "show": "print a config's values and where each was said, or the help of a key",
    "check": "show that no split of a batch changes what a config trains, or say what does",
    "plan": "print what a step takes on devices that are not here: memory, collectives",
    "replay": "take a step of a run again: the same bits, and from all sides",
    "diff": "say where two runs part: the first step, number, batch and leaf",
    "ckpt": "list, verify, show, compare, remove and export checkpoints",
    "data": "write text as token files; print what a config's batches hold",
    "sweep": "run a config with several values, side by side, and say which is best",
    "launch": "do any of these in several processes on this machine",
    "report": "write one HTML page about some runs: curves, differences, speed, samples",
}
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Does what was typed; gives the exit code: 0 done, 2 a mistake in it, 70 a fault."""
    typed = sys.argv[1:] if argv is None else argv
    verb, *rest = typed or ["--help"]
    try:
        return _do(verb, rest)
    except (UserError, PeerError, DeviceError) as error:
        print(redact(str(error)), file=sys.stderr)
        return error.code
    except SystemExit as stop:  # how argparse ends
        return stop.code if isinstance(stop.code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `jtrain show x.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        if isinstance(error, RuntimeError | AssertionError) and (told := refused_platform(error)):
            print(told, file=sys.stderr)
            return told.code
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return FAULT


def leave(code: int) -> NoReturn:
    """Ends the process.

    A signal changes nothing any more. One of several that failed does not wait for the others:
    JAX's would for 300 s, for they hang.
    """
    for number in ASKS:
        signal.signal(number, signal.SIG_IGN)
    jax = sys.modules.get("jax")
    if code not in {DONE, STOPPED} and jax is not None and jax.distributed.is_initialized():
        exit_alone(code)
    sys.exit(code)


def _do(verb: str, rest: list[str]) -> int:
    if verb in VERBS:
        code = importlib.import_module(f"jtrain.cli.{verb}").main(rest)
        sys.stdout.flush()
        return code
    if verb not in {"-h", "--help", "--version"}:
        raise UserError(_unknown(verb))
    print(f"jtrain {version('jtrain')}" if verb == "--version" else _help())
    return DONE


def _help() -> str:
    verbs = "\n".join(f"  {verb:6} {does}" for verb, does in VERBS.items())
    return f"""\
jtrain trains any pure JAX loss function on any number of devices.

  jtrain VERB CONFIG [KEY=VALUE ...]
  jtrain VERB --help

{verbs}

For example: jtrain run configs/shakespeare.yaml steps=400 optimizer.lr=2e-3"""


def _unknown(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, 1)
    if verb.endswith((".yaml", ".yml")):
        meant = f"; did you mean jtrain run {verb}?"
    else:
        meant = f"; did you mean {near[0]}?" if near else ""
    return f"jtrain: {verb} is no verb; the verbs are {', '.join(VERBS)}{meant}"
