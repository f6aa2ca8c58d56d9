"""Attempts of a restarted run: does it still make progress?"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jtrain.distributed.heartbeat import Beat
from jtrain.distributed.launcher.process_group import GroupExit
from jtrain.errors import FAULT
from jtrain.io.regular_files import TooLargeError, parse_json, read_bytes

MOST = 1 << 30  # bytes of a run's file that are read
ATTEMPTS = 3  # attempts that end at the same step: the failure is systematic


@dataclasses.dataclass(frozen=True)
class ReportedFault:
    """A fault that the run found in itself: the run ends with it after a restart, too."""

    step: int
    batch: int | None
    """The batch of that step, from 0; None: unknown."""
    why: str
    guard: bool
    """True if a bad step ended the run, and its guard forbids another attempt."""

    @classmethod
    def read(cls, run: str) -> "ReportedFault | None":
        """Read the fault from the directory of a run; None unless the run itself reports one."""
        status = _rows(run, "run.json", single=True)
        if not status or status[0].get("status") != "failed" or not status[0].get("why"):
            return None
        bad = next(reversed(_rows(run, "events.jsonl")), {})
        step, batch = bad.get("step", status[0].get("step", 0)), bad.get("batch")
        return cls(
            step if type(step) is int else 0,
            batch if type(batch) is int else None,
            f"{status[0]['why']}",
            bad.get("done") == "stopped",
        )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a run: its progress and its end."""

    exit: GroupExit
    step: int
    """The last step that all processes began."""
    checkpoint: int
    """The newest checkpoint that the attempt sealed; 0: none."""
    run: str
    """The run's directory; empty before it was created."""
    fault: ReportedFault | None = None
    """The fault that the run reports, if any."""

    @classmethod
    def from_exit(cls, exit: GroupExit, beats: list[Beat]) -> "Attempt":
        """Build an attempt from its end and the last beats of its processes."""
        run = next((beat.run for beat in beats if beat.run), "")
        step, checkpoint = min(beat.step for beat in beats), max(beat.checkpoint for beat in beats)
        fault = ReportedFault.read(run) if exit.code == FAULT else None
        return cls(exit, step, checkpoint, run, fault)

    @property
    def resume_point(self) -> str:
        """Text that says where the next attempt resumes; empty if unknown."""
        if not self.run:
            return ""
        try:
            names = os.listdir(Path(self.run) / "checkpoints")
        except OSError:
            names = []
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        if newest:
            return f" from checkpoint {newest}"
        return " from the beginning: no checkpoint was sealed yet"


class AttemptHistory:
    """Failed attempts of a run.

    Args:
        program: the words before the verb that start the same processes again.
    """

    def __init__(self, program: str = ""):
        self._program = program or "jtrain"
        self._furthest, self._checkpoint, self._repeats = -1, -1, 0
        self.last: Attempt | None = None

    def add(self, attempt: Attempt) -> None:
        """Record an attempt that failed."""
        further = attempt.step > self._furthest or attempt.checkpoint > self._checkpoint
        self._repeats = 1 if further else self._repeats + 1
        self._furthest = max(self._furthest, attempt.step)
        self._checkpoint = max(self._checkpoint, attempt.checkpoint)
        self.last = attempt

    @property
    def repeats(self) -> int:
        """The last attempts in a row, none of which made more progress than their first."""
        return self._repeats

    @property
    def stuck(self) -> bool:
        """True if the run fails at the same place repeatedly."""
        return self._repeats >= ATTEMPTS

    def diagnosis(self) -> str:
        """Return the known facts about the place of the failure, and commands to inspect it."""
        attempt = self.last
        assert attempt is not None, "a failed attempt was added"
        fault, worker = attempt.fault, attempt.exit.worker
        step = fault.step if fault else self._furthest + 1
        batch = step - 1 if fault is None or fault.batch is None else fault.batch
        config = f"{attempt.run}/config.yaml"
        lines = [
            f"{self._repeats} attempts in a row ended no later than step {self._furthest}, without "
            f"a newer checkpoint: no further restart.",
            f"  fails in     step {step}, batch {batch} of the training data",
            f"  last loss    {_last_loss(attempt.run)}",
        ]
        if fault:
            lines.append(f"  why          {fault.why}")
        else:
            lines.append(f"  output       of process {worker.index if worker else 0}, below")
        if attempt.exit.stacks:
            lines.append(f"  stacks       {attempt.exit.stacks}")
        if attempt.run:
            lines += [
                f"  its rows     jtrain data show {config} --step {batch}",
                f"  NaN, shapes  jtrain run {config} --find-nan",
            ]
        if attempt.run and not fault:
            lines.append(f"  to resume    {self._program} run {config}")
        return "\n".join(lines) + "\n"


def _last_loss(run: str) -> str:
    """Return the last loss in metrics.jsonl, with its step."""
    for row in reversed(_rows(run, "metrics.jsonl")):
        if "loss" in row:
            return f"{row['loss']} at step {row.get('step')}"
    return "none was written"


def _rows(run: str, name: str, *, single: bool = False) -> list[dict[str, Any]]:
    """Return the JSON objects in a file of a run: one per line, or a `single` one in all."""
    try:
        content = read_bytes(Path(run) / name, most=MOST, inside=Path(run)) if run else b""
    except (OSError, TooLargeError):
        return []
    text = content.decode("utf-8", "replace")
    rows = map(_row, [text] if single else text.splitlines())
    return [row for row in rows if row]


def _row(text: str) -> dict[str, Any]:
    try:
        row = parse_json(text)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
