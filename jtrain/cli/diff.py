"""`jtrain diff RUN RUN`: where two runs part, the first step, number, batch and leaf."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import config_of
from jtrain.config.command_line import spell

if TYPE_CHECKING:
    from jtrain.inspect.debug.first_difference import RunDifference

SHOWN = 12  # lines of one kind


def main(argv: Sequence[str]) -> int:
    """Says where they part; gives the exit code."""
    typed = _arguments().parse(argv)
    one, other = (config_of(run, "diff").parent for run in (typed.run, typed.other))

    import jax

    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the run that may train

    from jtrain.inspect.debug.first_difference import parting

    found = parting(one, other)
    if typed.json:
        print(json.dumps({**dataclasses.asdict(found), "nothing": found.nothing}, default=str))
    else:
        print(told(found, typed.run, typed.other))
    return 0


def told(found: "RunDifference", one: str, other: str) -> str:
    """What a person reads."""
    lines = [f"{one} | {other}"]
    for title, changes in (("config", found.values), ("ran on", found.facts)):
        lines += [f"{title}  {c.key}: {_short(c.before)} | {_short(c.after)}" for c in changes][
            :SHOWN
        ]
        lines += [f"{title}  and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    if found.batch is not None:
        lines.append(f"batch   of step {found.batch} is the first that is another: other data")
    if found.readers is not None:
        reads = " and ".join(
            f"{count} process{'es' * (count > 1)} read those of {run}"
            for count, run in zip(found.readers, (one, other), strict=True)
        )
        lines.append(f"batch   not compared, for {reads}")
    if found.number is not None:
        n = found.number
        lines.append(f"number  {n.name} of step {n.step} is the first that is another:")
        lines.append(f"        {n.one!r} | {n.other!r}{_apart(n.one, n.other)}")
    elif found.compared:
        lines.append(f"number  all the same in the {found.compared} steps that both have")
    else:
        lines.append("number  no step that both have numbers of")
    return "\n".join([*lines, *_state(found)])


def _state(found: "RunDifference") -> list[str]:
    if found.checkpoint is None:
        if not found.checkpoints:
            return ["state   no step that both have a checkpoint of"]
        steps = ", ".join(map(str, found.checkpoints))
        return [f"state   the same in every leaf at step {steps}"]
    since = f", the same at {found.same}" if found.same is not None else ""
    rows = found.leaves
    lines = [f"state   {len(rows)} leaves are apart at step {found.checkpoint}{since}, the first:"]
    width = max(len(row["leaf"]) for row in rows[:SHOWN])
    for row in rows[:SHOWN]:
        first, second = row["is"]
        far = f"{first} | {second}" if row["apart"] is None else f"by at most {row['apart']:.3g}"
        lines.append(f"        {row['leaf']:{width}}  {far}")
    return lines


def _apart(one: Any, other: Any) -> str:
    if not (isinstance(one, float) and isinstance(other, float)) or not one:
        return ""
    return f"  ({abs(other - one) / abs(one):.1e} of it)"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else spell(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _arguments() -> Arguments:
    parser = Arguments(
        "diff",
        "Says where two runs part: values, versions and devices; the first step whose batch, loss\n"
        "or metric is another; the first checkpoint that is, and which leaves of it. Exit code 0\n"
        "whether they part or not; with --json, `nothing` is true where they do not.",
        "shakespeare shakespeare-2",
        "runs/a runs/b --json",
    )
    run = "a directory with a run, or its name in runs/"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("other", metavar="RUN", help="another")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
