"""The lives of a run that was begun again and again: does it still come further?"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jtrain.distributed.heartbeat import Beat
from jtrain.distributed.launcher.process_group import GroupExit
from jtrain.errors import FAULT
from jtrain.io.regular_files import TooLargeError, parse_json, read_bytes

MOST = 1 << 30  # bytes of a file of a run that are looked at
LIVES = 3  # that end at the same step, and it is no accident


@dataclasses.dataclass(frozen=True)
class ReportedFault:
    """What a run says that found a fault in itself: so it ends when it is begun again, too."""

    step: int
    batch: int | None
    """That the step took, from 0; None: it does not say."""
    why: str
    guard: bool
    """Whether a bad step ended it, of which its guard is to make no more."""

    @classmethod
    def of(cls, run: str) -> "ReportedFault | None":
        """What lies in the directory of a run; None if that has not failed by its own judgement."""
        stands = _rows(run, "run.json", whole=True)
        if not stands or stands[0].get("status") != "failed" or not stands[0].get("why"):
            return None
        bad = next(reversed(_rows(run, "events.jsonl")), {})
        step, batch = bad.get("step", stands[0].get("step", 0)), bad.get("batch")
        return cls(
            step if type(step) is int else 0,
            batch if type(batch) is int else None,
            f"{stands[0]['why']}",
            bad.get("done") == "stopped",
        )


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How far it came, and how it ended."""

    ending: GroupExit
    step: int
    """The last that all processes began."""
    kept: int
    """The newest checkpoint that was sealed in it; 0: none."""
    run: str
    """The run's directory; empty if it did not come so far."""
    judged: ReportedFault | None = None
    """What the run says of its end, if that was its own judgement."""

    @classmethod
    def of(cls, ending: GroupExit, beats: list[Beat]) -> "Attempt":
        """The life that these were the last beats of."""
        run = next((beat.run for beat in beats if beat.run), "")
        step, kept = min(beat.step for beat in beats), max(beat.kept for beat in beats)
        judged = ReportedFault.of(run) if ending.code == FAULT else None
        return cls(ending, step, kept, run, judged)

    @property
    def begins(self) -> str:
        """Where the next one begins, in words; empty where that is not known."""
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
    """What became of each life.

    Args:
        typed: what a person types before the verb to have the same processes again.
    """

    def __init__(self, typed: str = ""):
        self._program = typed or "jtrain"
        self._furthest, self._kept, self._alike = -1, -1, 0
        self.last: Attempt | None = None

    def add(self, life: Attempt) -> None:
        """Notes a life that failed."""
        further = life.step > self._furthest or life.kept > self._kept
        self._alike = 1 if further else self._alike + 1
        self._furthest = max(self._furthest, life.step)
        self._kept = max(self._kept, life.kept)
        self.last = life

    @property
    def alike(self) -> int:
        """Lives in a row, the last one among them, none of which came further than the first."""
        return self._alike

    @property
    def stuck(self) -> bool:
        """Whether it fails at the same place again and again."""
        return self._alike >= LIVES

    def diagnosis(self) -> str:
        """What is known of the place where it fails, and what to type."""
        life = self.last
        assert life is not None, "a life that failed was added"
        judged, who = life.judged, life.ending.who
        step = judged.step if judged else self._furthest + 1
        batch = step - 1 if judged is None or judged.batch is None else judged.batch
        config = f"{life.run}/config.yaml"
        lines = [
            f"{self._alike} times in a row it came no further than step {self._furthest} and left "
            f"no newer checkpoint: it is not begun again.",
            f"  fails in     step {step}, batch {batch} of the training data",
            f"  last loss    {_last_loss(life.run)}",
        ]
        if judged:
            lines.append(f"  why          {judged.why}")
        else:
            lines.append(f"  whose words  process {who.index if who else 0}, below")
        if life.ending.stacks:
            lines.append(f"  stacks       {life.ending.stacks}")
        if life.run:
            lines += [
                f"  its rows     jtrain data show {config} --step {batch}",
                f"  NaN, shapes  jtrain run {config} --find-nan",
            ]
        if life.run and not judged:
            lines.append(f"  to go on     {self._program} run {config}")
        return "\n".join(lines) + "\n"


def _last_loss(run: str) -> str:
    """Of the last row of metrics.jsonl that has one, with its step."""
    for row in reversed(_rows(run, "metrics.jsonl")):
        if "loss" in row:
            return f"{row['loss']} at step {row.get('step')}"
    return "none was written"


def _rows(run: str, name: str, *, whole: bool = False) -> list[dict[str, Any]]:
    """The objects in a file of a run, a line each, or one in the `whole` of it; none without it."""
    try:
        found = read_bytes(Path(run) / name, most=MOST, inside=Path(run)) if run else b""
    except (OSError, TooLargeError):
        return []
    text = found.decode("utf-8", "replace")
    rows = map(_row, [text] if whole else text.splitlines())
    return [row for row in rows if row]


def _row(text: str) -> dict[str, Any]:
    try:
        row = parse_json(text)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
