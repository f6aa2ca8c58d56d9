"""`jtrain diff RUN RUN`: where two runs diverge: the first step, number, batch and leaf."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments, find_config
from jtrain.cli.output import print_text as print
from jtrain.config.schema import format_value

if TYPE_CHECKING:
    from jtrain.inspect.debug.compare import RunDifference

SHOWN = 12  # lines of one kind


def main(argv: Sequence[str]) -> int:
    """Print where two runs diverge; return the exit code."""
    args = _arguments().parse(argv)
    one, other = (find_config(run, "diff").parent for run in (args.run, args.other))

    import jax

    jax.config.update("jax_platforms", "cpu")  # leave the accelerator to a run that may be training

    from jtrain.inspect.debug.compare import compare_runs

    found = compare_runs(one, other)
    if args.json:
        print(json.dumps({**dataclasses.asdict(found), "nothing": found.nothing}, default=str))
    else:
        print(format_difference(found, args.run, args.other))
    return 0


def format_difference(found: "RunDifference", one: str, other: str) -> str:
    """Return the difference of two runs as text."""
    lines = [f"{one} | {other}"]
    for title, changes in (("config", found.values), ("ran on", found.facts)):
        lines += [f"{title}  {c.key}: {_short(c.before)} | {_short(c.after)}" for c in changes][
            :SHOWN
        ]
        lines += [f"{title}  and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    if found.batch is not None:
        lines.append(f"batch   differs first at step {found.batch}: the data differs")
    if found.readers is not None:
        reads = " and ".join(
            f"{count} process{'es' * (count > 1)} read the batches of {run}"
            for count, run in zip(found.readers, (one, other), strict=True)
        )
        lines.append(f"batch   not compared: {reads}")
    if found.number is not None:
        n = found.number
        lines.append(f"number  {n.name} differs first at step {n.step}:")
        lines.append(f"        {n.one!r} | {n.other!r}{_relative(n.one, n.other)}")
    elif found.compared:
        lines.append(f"number  equal in the {found.compared} steps of both runs")
    else:
        lines.append("number  no step has numbers in both runs")
    return "\n".join([*lines, *_state(found)])


def _state(found: "RunDifference") -> list[str]:
    if found.checkpoint is None:
        if not found.checkpoints:
            return ["state   no step has a checkpoint in both runs"]
        steps = ", ".join(map(str, found.checkpoints))
        return [f"state   equal in every leaf at step {steps}"]
    since = f", equal at {found.same}" if found.same is not None else ""
    rows = found.leaves
    lines = [f"state   {len(rows)} leaves differ at step {found.checkpoint}{since}, the first:"]
    width = max(len(row["leaf"]) for row in rows[:SHOWN])
    for row in rows[:SHOWN]:
        first, second = row["is"]
        values = f"{first} | {second}"
        difference = values if row["distance"] is None else f"by at most {row['distance']:.3g}"
        lines.append(f"        {row['leaf']:{width}}  {difference}")
    return lines


def _relative(one: Any, other: Any) -> str:
    if not (isinstance(one, float) and isinstance(other, float)) or not one:
        return ""
    return f"  ({abs(other - one) / abs(one):.1e} relative)"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else format_value(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _arguments() -> Arguments:
    parser = Arguments(
        "diff",
        "Print where two runs diverge: values, versions and devices; the first step whose batch,\n"
        "loss or metric differs; the first checkpoint that differs, and its leaves. The exit code\n"
        "is 0 in either case; with --json, `nothing` is true if nothing differs.",
        "shakespeare shakespeare-2",
        "runs/a runs/b --json",
    )
    run = "a directory with a run, or its name in runs/"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("other", metavar="RUN", help="the run to compare with")
    parser.add_json()
    return parser
