"""The lives of a run that was begun again and again: does it still come further?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jtrain.launch.gang import Ending
from jtrain.pulse import Beat

LIVES = 3  # that end at the same step, and it is no accident


@dataclasses.dataclass(frozen=True)
class Life:
    """How far it came, and how it ended."""

    ending: Ending
    step: int
    """The last that all processes began."""
    kept: int
    """The newest checkpoint that was sealed in it; 0: none."""
    run: str
    """The run's directory; empty if it did not come so far."""

    @classmethod
    def of(cls, ending: Ending, beats: list[Beat]) -> "Life":
        """The life that these were the last beats of."""
        run = next((beat.run for beat in beats if beat.run), "")
        step, kept = min(beat.step for beat in beats), max(beat.kept for beat in beats)
        return cls(ending, step, kept, run)


class History:
    """What became of each life."""

    def __init__(self):
        self._furthest, self._kept, self._alike = -1, -1, 0
        self.last: Life | None = None

    def add(self, life: Life) -> None:
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
        step, who = self._furthest + 1, life.ending.who
        config = f"{life.run}/config.yaml"
        loss = _last_loss(life.run)
        lines = [
            f"{self._alike} times in a row it came no further than step {self._furthest} and left "
            f"no newer checkpoint: it is not begun again.",
            f"  fails in     step {step}, batch {step - 1} of the training data",
            f"  last loss    {loss}",
            f"  whose words  process {who.index if who else 0}, below",
        ]
        if life.ending.stacks:
            lines.append(f"  stacks       {life.ending.stacks}")
        if life.run:
            lines += [
                f"  its rows     jtrain data show {config} --step {step - 1}",
                f"  NaN, shapes  jtrain run {config} --find-nan",
                f"  to go on     jtrain run {config}",
            ]
        return "\n".join(lines) + "\n"


def _last_loss(run: str) -> str:
    """Of the last row of metrics.jsonl that has one, with its step."""
    try:
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines() if run else []
    except OSError:
        lines = []
    for line in reversed(lines):
        row = _row(line)
        if "loss" in row:
            return f"{row['loss']} at step {row.get('step')}"
    return "none was written"


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
