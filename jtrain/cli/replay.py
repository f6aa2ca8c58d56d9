"""`jtrain replay RUN --step N`: a step taken again, and whether it has the bits of then."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import config_of, said_apart, speaks
from jtrain.config.resolve import resolve
from jtrain.errors import FAULT

if TYPE_CHECKING:
    from jtrain.inspect.debug.replay import ReplayResult

SHOWN = 8  # leaves that are shown


def main(argv: Sequence[str]) -> int:
    """Takes it again and says what was found; gives the exit code."""
    typed = _arguments().parse(argv)
    path = config_of(typed.run, "replay")
    resolved = resolve(path, typed.settings)

    from jtrain.inspect.debug.replay import replay

    tell = lambda line: print(line, file=sys.stderr)
    with said_apart():
        found = replay(
            resolved.config, path.parent, typed.step, deep=not typed.only_again, tell=tell
        )
    if speaks():
        print(json.dumps(dataclasses.asdict(found)) if typed.json else told(found, typed.run))
    return FAULT if found.other or found.checkpoint else 0


def told(found: "ReplayResult", run: str) -> str:
    """What a person reads."""
    here, first, last = found.here, *found.rows
    lines = [
        f"step {found.step}, batch {found.step - 1}, rows {first} to {last}, "
        f"digest {here.batch}, key {' '.join(f'{x:08x}' for x in found.key)}",
        f"  again   loss {here.loss!r}  gradient norm {here.grad_norm!r}",
    ]
    if found.there is not None:
        there = found.there
        lines.append(f"  then    loss {there.loss!r}  gradient norm {there.grad_norm!r}")
    lines.append(f"  {_verdict(found)}")
    if found.readers:
        then, now = found.readers
        launch = f"launch --processes {then} " if then > 1 else ""
        lines.append(
            f"  batches: not compared, for {then} process{'es' * (then > 1)} read them then and "
            f"{now} {'do' if now > 1 else 'does'} now; to compare them: "
            f"jtrain {launch}replay {run} --step {found.step}"
        )
    if found.checkpoint:
        names = ", ".join(found.checkpoint[:SHOWN])
        lines.append(f"  checkpoint {found.step} has other bits in {names}")
    elif found.checkpoint is not None:
        lines.append(f"  checkpoint {found.step} has the same bits in every leaf")
    return "\n".join([*lines, *_dissected(found)])


def _verdict(found: "ReplayResult") -> str:
    if found.other is not None:
        at, then = found.other.step, found.other
        if then.batch:
            return (
                f"OTHERWISE from step {at} on: its batch was another, digest "
                f"{then.there.batch} then and {then.here.batch} now. The data has changed"
            )
        batch = "on the same batch" if then.there.batch else "on a batch that was not compared"
        return (
            f"OTHERWISE from step {at} on, {batch}: loss {then.there.loss!r} then, "
            f"{then.here.loss!r} now. {_why(found)}"
        )
    if not found.compared:
        return "the run has no record of these steps to compare with"
    steps = f"{found.compared} of {found.step - found.start} steps since {_start(found)}"
    return f"the same bits as then, in {steps}"


def _why(found: "ReplayResult") -> str:
    """The likely cause of other bits: what is known to be another, before what is suspected."""
    if found.unlike:
        return (
            f"It was taken otherwise, which is the likely cause: {'; '.join(found.unlike)}. Other "
            f"processes, devices and versions round sums in another order, other code computes "
            f"something else. To compare bits, take it as it was taken then"
        )
    return (
        "Versions, devices, processes and layout are as they were then (run.json). Run it once "
        "more: if it comes out as it did then, a device computes wrongly now and then; if not, one "
        "did then"
    )


def _start(found: "ReplayResult") -> str:
    return f"checkpoint {found.start}" if found.start else "the beginning"


def _dissected(found: "ReplayResult") -> list[str]:
    parts = found.dissected
    if parts is None:
        return []
    apart = abs(parts.eager_loss - found.here.loss) / max(abs(found.here.loss), 1e-30)
    lines = [
        f"  without jit  loss {parts.eager_loss!r}  gradient norm {parts.eager_grad_norm!r}  "
        f"({apart:.1e} from the compiled one)",
        f"  checks       {parts.checks or 'every value finite, every index within bounds'}",
        "  the largest updates:",
    ]
    ratio = parts.leaves["ratio"]
    order = sorted(ratio, key=lambda leaf: (ratio[leaf] == ratio[leaf], -ratio[leaf]))[:SHOWN]
    width = max(map(len, order), default=0)
    for leaf in order:
        of = {kind: each[leaf] for kind, each in parts.leaves.items()}
        lines.append(
            f"    {leaf:{width}}  gradient {of['grad_norm']:.4g}  update {of['update_norm']:.4g}  "
            f"parameter {of['param_norm']:.4g}  update/parameter {of['ratio']:.2e}"
        )
    return lines


def _arguments() -> Arguments:
    parser = Arguments(
        "replay",
        "Takes a step of a run again, from the checkpoint before it, on the same batch, with the\n"
        "same keys, by the same program; then without jit, with checks, and leaf by leaf. Writes\n"
        "nothing. Exit code 70 where bits are otherwise than in the run; the batches are compared\n"
        "where as many processes read them as then: jtrain launch --processes N replay RUN ...",
        "shakespeare --step 250",
        "shakespeare --step 250 --only-again --json",
    )
    parser.add_argument("run", metavar="RUN", help="a directory with a run, or its name in runs/")
    words = "values to change: of parallel"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    words = "the step, from 1 on"
    parser.add_argument("--step", type=int, required=True, metavar="N", help=words)
    words = "only as the run took it: not without jit, with checks and leaf by leaf"
    parser.add_argument("--only-again", action="store_true", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
