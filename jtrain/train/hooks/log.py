"""Log lines of a run, and metrics.jsonl: the numbers that a run computed.

Two runs that compute the same bits write the same metrics.jsonl, even if one of them was killed and
resumed. The numbers of all steps up to a checkpoint are reported before it is saved, so the rows
that a resume drops are the rows that the resumed run writes again.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.errors import LossError
from jtrain.io.formatting import format_count, format_duration, format_number, format_seconds
from jtrain.io.jsonl import JsonlWriter, read_rows
from jtrain.io.log import log_progress
from jtrain.train.hooks.speed import Speed


class LogHook(Hook):
    """Hook that logs a line for steps `every`, 2 `every`, ... and the last, in columns.

    `step   400/2000  loss   2.1432  valid   2.2011  lr 9.80e-04   52.1k tokens/s ...`

    Args:
        every: steps.
        stop: the last step of the run.
        speed: gives the speed, the time left and the share of time spent waiting for data.
        valid: gives the newest validation loss, None before the first.
        learning_rate: after a number of updates; None to show none.
    """

    def __init__(
        self,
        *,
        every: int,
        stop: int,
        speed: Speed | None = None,
        valid: Callable[[], float | None] | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ):
        self.every = every
        self._stop, self._speed = stop, speed
        self._valid, self._learning_rate = valid, learning_rate

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a line."""
        cells = [f"step {step:>{len(str(self._stop))}}/{self._stop}"]
        cells.append(f"loss {format_number(numbers['loss']):>8}")
        if self._valid is not None:
            loss = self._valid()
            cells.append(f"valid {'-' if loss is None else format_number(loss):>8}")
        if self._learning_rate is not None:
            cells.append(f"lr {float(self._learning_rate(updates_before(step, numbers))):.2e}")
        if self._speed is not None:
            cells += _speed_cells(self._speed)
        if numbers.get("skipped", 0) > 0:
            cells.append(f"skipped {numbers['skipped']:.0f}")
        log_progress("  ".join(cells).rstrip())


def updates_before(step: int, numbers: Mapping[str, float]) -> int:
    """Return the updates before that of a step: a schedule counts these, and no skipped step."""
    return max(step - 1 - int(numbers.get("skipped", 0)), 0)


def _speed_cells(speed: Speed) -> list[str]:
    """Return rate, quantiles of the time of a step, utilization, time left and share of waiting.

    HFU is shown where the backward pass computes something again.
    """
    pace, unit = speed.pace, speed.unit
    if pace is None:
        return [f"{'-':>6} {unit}/s", f"{'-':>8} left", f"waiting {'-':>6}"]
    cells = [f"{format_count(speed.rate):>6} {unit}/s"]
    if pace.p50 is not None and pace.p90 is not None:
        cells += [f"p50 {format_seconds(pace.p50):>7}", f"p90 {format_seconds(pace.p90):>7}"]
    if pace.mfu is not None:
        cells.append(f"mfu {pace.mfu:.1%}")
        if pace.hfu is not None and pace.hfu > 1.005 * pace.mfu:
            cells.append(f"hfu {pace.hfu:.1%}")
    return [*cells, f"{format_duration(pace.left):>8} left", f"waiting {pace.waiting:>6.1%}"]


class MetricsFile(Hook):
    """Hook that writes a row for steps `every`, 2 `every`, ... and the last.

    A row is `{"step": 20, "loss": 2.25, ...}`.
    """

    def __init__(self, rows: JsonlWriter, *, every: int):
        self.rows, self.every = rows, every

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a row."""
        self.row(step, "", numbers)

    def row(self, step: int, prefix: str, numbers: Mapping[str, Any]) -> None:
        """Write a row of results: prefix `valid` and `{"loss": ...}` give `valid/loss`."""
        named = _with_prefix(prefix, numbers)
        if "step" in named:
            raise LossError(
                'a metric is called "step", which is the key of each row of metrics.jsonl. Give it '
                'another name in the metrics that the loss returns, such as "position".'
            )
        self.rows.append({"step": step, **named})


def read_results(path: Path | str, prefix: str) -> dict[int, dict[str, float]]:
    """Return the numbers by step that `row` wrote with a prefix ("" for training), without it."""
    numbers_by_step: dict[int, dict[str, float]] = {}
    for row in read_rows(path):
        step = row.pop("step")
        split = [(*name.rpartition("/"), x) for name, x in row.items()]
        numbers = {name: x for before, _, name, x in split if before == prefix}
        if numbers:
            numbers_by_step.setdefault(step, {}).update(numbers)
    return numbers_by_step


class MetricHistory(Hook):
    """The numbers of steps `every`, 2 `every`, ... and the last, by name and step.

    `numbers["loss"][100]`
    """

    def __init__(self, *, every: int = 1):
        self.every, self.rows = every, None
        self.numbers: dict[str, dict[int, Any]] = {}
        """Numbers by name and step, in order."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step."""
        self.row(step, "", numbers)

    def row(self, step: int, prefix: str, numbers: Mapping[str, Any]) -> None:
        """Keep results: prefix `valid` and `{"loss": ...}` give `valid/loss`."""
        for name, number in _with_prefix(prefix, numbers).items():
            self.numbers.setdefault(name, {})[step] = number


def _with_prefix(prefix: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}" if prefix else name: x for name, x in numbers.items()}
