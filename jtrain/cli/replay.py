"""`jtrain replay RUN --step N`: recompute a step and compare its bits with the run's."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments, find_config
from jtrain.cli.output import is_first_process, print_error, redirect_output
from jtrain.cli.output import print_text as print
from jtrain.config.resolve import resolve
from jtrain.errors import FAULT

if TYPE_CHECKING:
    from jtrain.inspect.debug.replay import ReplayResult

SHOWN = 8  # leaves to print


def main(argv: Sequence[str]) -> int:
    """Recompute the step and print the comparison; return the exit code."""
    args = _arguments().parse(argv)
    path = find_config(args.run, "replay")
    resolved = resolve(path, args.settings)

    from jtrain.inspect.debug.replay import replay

    with redirect_output():
        found = replay(resolved.config, path.parent, args.step, log=print_error)
    if is_first_process():
        print(
            json.dumps(dataclasses.asdict(found)) if args.json else format_replay(found, args.run)
        )
    return FAULT if found.other or found.checkpoint else 0


def format_replay(found: "ReplayResult", run: str) -> str:
    """Return the result as text."""
    new, first, last = found.replayed, *found.rows
    lines = [
        f"step {found.step}, batch {found.step - 1}, rows {first} to {last}, "
        f"digest {new.batch}, key {' '.join(f'{x:08x}' for x in found.key)}",
        f"  again   loss {new.loss!r}  gradient norm {new.grad_norm!r}",
    ]
    if found.recorded is not None:
        old = found.recorded
        lines.append(f"  run     loss {old.loss!r}  gradient norm {old.grad_norm!r}")
    lines.append(f"  {_verdict(found)}")
    if found.readers:
        then, now = found.readers
        launch = f"launch --processes {then} " if then > 1 else ""
        lines.append(
            f"  batches: not compared: {then} process{'es' * (then > 1)} read them in the run and "
            f"{now} now; to compare them: jtrain {launch}replay {run} --step {found.step}"
        )
    if found.checkpoint:
        names = ", ".join(found.checkpoint[:SHOWN])
        lines.append(f"  checkpoint {found.step} differs in {names}")
    elif found.checkpoint is not None:
        lines.append(f"  checkpoint {found.step} has equal bits in every leaf")
    return "\n".join(lines)


def _verdict(found: "ReplayResult") -> str:
    if found.other is not None:
        at, then = found.other.step, found.other
        if then.batch:
            return (
                f"DIFFERENT from step {at} on: its batch differs, digest {then.recorded.batch} in "
                f"the run and {then.replayed.batch} now. The data has changed"
            )
        batch = "on the same batch" if then.recorded.batch else "on a batch that was not compared"
        return (
            f"DIFFERENT from step {at} on, {batch}: loss {then.recorded.loss!r} in the run, "
            f"{then.replayed.loss!r} now. {_why(found)}"
        )
    if not found.compared:
        return "the run has no record of these steps to compare with"
    steps = f"{found.compared} of {found.step - found.start} steps since {_start(found)}"
    return f"the same bits as in the run, in {steps}"


def _why(found: "ReplayResult") -> str:
    """Return the likely cause of a difference: known differences first, then suspicions."""
    if found.unlike:
        return (
            f"The likely cause: {'; '.join(found.unlike)}. Other "
            f"processes, devices and versions round sums in another order, and other code computes "
            f"something else. To compare bits, replay the step under the run's conditions"
        )
    return (
        "Versions, devices, processes and layout are those of the run (run.json). Replay it once "
        "more: if the bits then match the run, a device computes wrongly now and then; if not, one "
        "did so in the run"
    )


def _start(found: "ReplayResult") -> str:
    return f"checkpoint {found.start}" if found.start else "the beginning"


def _arguments() -> Arguments:
    parser = Arguments(
        "replay",
        "Recompute a step of a run from the checkpoint before it, on the same batch, with the\n"
        "same keys, by the same program. Writes nothing. The exit code is 70 if bits differ from\n"
        "the run. Batches are compared only if as many processes read them as in the run:\n"
        "jtrain launch --processes N replay RUN ...",
        "shakespeare --step 250",
        "shakespeare --step 250 --json",
    )
    parser.add_run(settings="parallel")
    words = "the step, from 1 on"
    parser.add_argument("--step", type=int, required=True, metavar="N", help=words)
    parser.add_json()
    return parser
