"""End of `jtrain run`: the curve, a sample, files, the next commands, and a profile."""

import contextlib
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.cli.output import print_text as print
from jtrain.config.top import RUNS
from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.cluster import command_words
from jtrain.errors import UserError
from jtrain.inspect.ledger import format_goodput, read_ledger
from jtrain.inspect.profile import FOLDER, format_profile, summarize_trace
from jtrain.train.charts import Point, text_chart
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.log import read_results
from jtrain.train.hooks.profile_window import ProfileWindow, StepWindow
from jtrain.train.longer_run import settings_to_extend
from jtrain.train.program import set_up
from jtrain.train.run_result import FINISHED, RunResult


def format_summary(
    outcome: RunResult, config: RunConfig, source: Path, command: str, settings: Sequence[str]
) -> str:
    """Return the summary that `jtrain run` prints.

    Args:
        settings: the part of it that changes values, such as `steps=400`.
    """
    directory = outcome.directory
    ledger = read_ledger(directory.times)
    time = format_goodput(ledger) if ledger else ""
    parts = [_curve(outcome), _sample(outcome), _best(outcome), time, _files(outcome)]
    if outcome.status == "done":
        ending = f"done at step {outcome.step}: {outcome.why}" if outcome.why else ""
        kept = [x for x in settings if not x.startswith(("name=", "optimizer.lr="))]
        rate = getattr(config.optimizer, "lr", 1e-3) / 2
        changed = [*kept, f"name={directory.path.name}-2", f"optimizer.lr={rate:g}"]
        again = f"{command_words()} run {source} {shlex.join(changed)}"
        more = " ".join(settings_to_extend(config, 2 * outcome.step))
        commands = (
            f"next:  {again}   another run, one value changed\n"
            f"       {command_words()} run {directory.config} {more}   train it longer\n"
            f"       jtrain eval {directory.path}   evaluate it\n"
            f"       jtrain show {source}   every value and its origin"
        )
        # The last line is read: it says if nothing was trained.
        finished = outcome.why.startswith(FINISHED)
        parts += [commands, ending] if finished else [ending, commands]
    else:
        resumes = f"resumes from step {outcome.checkpoint}"
        if outcome.checkpoint is None:
            resumes = "begins from the beginning: no checkpoint was saved"
        parts.append(f"{outcome.status} at step {outcome.step}: {outcome.why}")
        parts.append(f"next:  {command}   {_processes_note()}{resumes}")
    return "\n\n".join(part for part in parts if part)


def _processes_note() -> str:
    """Return a note that several processes need the command, if there are several."""
    count = jax.process_count()
    return f"in each of its {count} processes " if count > 1 and command_words() == "jtrain" else ""


def _curve(outcome: RunResult) -> str:
    rows = read_results(outcome.directory.metrics, "")
    points = {
        "training loss": smooth(_losses(rows)),
        "validation": _losses(outcome.results),
    }
    if len(points["training loss"]) < 3:
        return ""
    width = min(100, shutil.get_terminal_size().columns)
    return text_chart(points, width=width, height=16)


def smooth(points: Iterable[Point], share: float = 0.02) -> list[Point]:
    """Return the points, each value averaged over about `share` of all points, those before it.

    The exponential mean has no bias: its first value is the first point's. Values that are not
    finite are omitted.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    decay = 1 - 1 / max(1.0, share * len(finite))
    total, weight, averages = 0.0, 0.0, []
    for x, y in finite:
        total, weight = decay * total + y, decay * weight + 1
        averages.append((x, total / weight))
    return averages


def _losses(rows: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the losses by step; rows without one are skipped: others may write to the file."""
    found = ((step, row.get("loss")) for step, row in rows.items())
    return [(step, loss) for step, loss in found if isinstance(loss, int | float)]


def _sample(outcome: RunResult) -> str:
    if not outcome.sample:
        return ""
    lines = "\n".join(f"  {line}" for line in outcome.sample.splitlines())
    return f"a sample:\n\n{lines}"


def _best(outcome: RunResult) -> str:
    lines = []
    for name, found in outcome.sets.items():
        for step, numbers in list(found.items())[-1:]:
            single = {n: value for n, value in numbers.items() if isinstance(value, int | float)}
            text = "  ".join(f"{name} {value:.4g}" for name, value in single.items())
            label = name if len(outcome.sets) > 1 else "validation"
            lines.append(f"{label} at step {step}:  {text}")
    return "\n".join(lines)


def _files(outcome: RunResult) -> str:
    directory = outcome.directory
    descriptions = {
        directory.config: "every value of the run; it can be run itself",
        directory.metrics: "the metrics, a row a step",
        directory.speed: "how fast",
        directory.times: "where the time went",
        directory.steps: "the batch and the loss of every step, for jtrain replay and diff",
        directory.log: "the log",
        directory.samples: "samples of the model",
        directory.checkpoints: "the checkpoints",
    }
    existing = {path: text for path, text in descriptions.items() if path.exists()}
    width = max(len(str(path)) for path in existing)
    return "\n".join(f"{path!s:{width}}  {text}" for path, text in existing.items())


def open_profile(window: str, config: RunConfig) -> ProfileWindow:
    """Return the hook that traces a window such as `10:15`.

    Raises:
        ConfigError: if it is no window of steps of the run.
    """
    steps = StepWindow.parse(window, config.steps if isinstance(config.steps, int) else None)
    place, folder = detect(os.environ), RUNS / config.run_name / FOLDER
    own = folder.with_name(f"{FOLDER}-{place.index}") if place.index else folder
    return ProfileWindow(steps, own, steps_per_call=config.steps_divisor)


def print_profile(hook: ProfileWindow, config: RunConfig, outcome: RunResult) -> None:
    """Read the trace, write its summary into the run's directory, and print it."""
    hook.finish(outcome.step)
    if hook.traced is None or not outcome.directory.first:
        return
    text = ""  # of the compiled step, whose names tell modules
    with contextlib.suppress(UserError, jax.errors.JaxRuntimeError):
        if jax.process_count() == 1:
            text = set_up(config).lower_step().compile().as_text() or ""
    found = summarize_trace(outcome.directory.path, hook.traced, text)
    if found is not None:
        print(f"\n{format_profile(found)}")
        print(f"to print this again: jtrain show {outcome.directory.path.name} --profile")
