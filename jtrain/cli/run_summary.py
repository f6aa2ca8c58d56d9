"""What a person reads when a run has ended: the curve, a sample, where it lies, what to type."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jtrain.distributed.cluster.command_line import program
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.curve import curve, only_ascii, smooth
from jtrain.train.hooks.metrics import results
from jtrain.train.longer_run import longer
from jtrain.train.run import RunResult


def ending(outcome: RunResult, config: RunConfig, source: Path, command: str) -> str:
    """The last words of `jtrain run`, which was typed as `command` for the config at `source`."""
    directory = outcome.directory
    parts = [_curve(outcome), _sample(outcome), _best(outcome), _files(outcome)]
    if outcome.status == "done":
        if outcome.why:
            parts.append(f"done at step {outcome.step}: {outcome.why}")
        again = f"{program()} run {source} name={directory.path.name}-2 optimizer.lr=1e-3"
        more = " ".join(longer(config, 2 * outcome.step))
        parts.append(
            f"next:  {again}   another run, one value changed\n"
            f"       {program()} run {directory.config} {more}   train it longer\n"
            f"       jtrain eval {directory.path}   measure it again\n"
            f"       jtrain show {source}   every value and where it was said"
        )
    else:
        parts.append(f"{outcome.status} at step {outcome.step}: {outcome.why}")
        parts.append(f"next:  {command}   {_in_each()}{_on(outcome)}")
    return "\n\n".join(part for part in parts if part)


def _in_each() -> str:
    """What else is to be known of a command that several processes have to be given."""
    count = jax.process_count()
    return f"in each of its {count} processes " if count > 1 and program() == "jtrain" else ""


def _on(outcome: RunResult) -> str:
    """Where the same command begins."""
    if outcome.kept is None:
        return "begins from the beginning: no checkpoint was kept"
    return f"goes on from step {outcome.kept}"


def _curve(outcome: RunResult) -> str:
    rows = results(outcome.directory.metrics, "")
    points = {
        "training loss": smooth(_losses(rows)),
        "validation": _losses(outcome.results),
    }
    if len(points["training loss"]) < 3:
        return ""
    width = min(100, shutil.get_terminal_size().columns)
    return curve(points, width=width, height=16, ascii=only_ascii(sys.stdout.encoding))


def _losses(rows: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, float]]:
    """The steps whose row has a loss: the file may have been written by others too."""
    found = ((step, row.get("loss")) for step, row in rows.items())
    return [(step, loss) for step, loss in found if isinstance(loss, int | float)]


def _sample(outcome: RunResult) -> str:
    if not outcome.sample:
        return ""
    lines = "\n".join(f"  {line}" for line in outcome.sample.splitlines())
    return f"in the model's hand:\n\n{lines}"


def _best(outcome: RunResult) -> str:
    lines = []
    for name, found in outcome.sets.items():
        for step, numbers in list(found.items())[-1:]:
            single = {n: value for n, value in numbers.items() if isinstance(value, int | float)}
            told = "  ".join(f"{name} {value:.4g}" for name, value in single.items())
            of = name if len(outcome.sets) > 1 else "validation"
            lines.append(f"{of} at step {step}:  {told}")
    return "\n".join(lines)


def _files(outcome: RunResult) -> str:
    directory = outcome.directory
    what = {
        directory.config: "every value of the run; it can be run itself",
        directory.metrics: "what was computed, a row a step",
        directory.speed: "how fast",
        directory.steps: "the batch and the loss of every step, for jtrain replay and diff",
        directory.log: "what was said",
        directory.samples: "what the model wrote",
        directory.checkpoints: "the states that are kept",
    }
    there = {path: text for path, text in what.items() if path.exists()}
    width = max(len(str(path)) for path in there)
    return "\n".join(f"{path!s:{width}}  {text}" for path, text in there.items())
