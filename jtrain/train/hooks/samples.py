"""Samples of a model, at a cadence, in a readable file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.io.atomic_write import atomic_write
from jtrain.io.regular_files import open_regular, read_bytes

MAX_BYTES = 1 << 30
_HEAD = re.compile(r"^=== step (\d+) ===$", re.MULTILINE)


class Samples(Hook):
    """Hook that appends a sample to a file after steps `every`, 2 `every`, ...

    Each sample has a heading: `=== step 300 ===`.

    Args:
        path: the file; recreated unless the run resumes.
        every: steps.
        sample: `state -> text`; must not keep the state.
        log: takes the step and the text too, to show it.
        resumed_at: step of the checkpoint that the run resumes from; later samples are removed,
            because the run makes them again. None for a new run.
    """

    settles = True  # so that its time is not counted for the steps before it

    def __init__(
        self,
        path: Path | str,
        *,
        every: int,
        sample: Callable[[Any], str],
        log: Callable[[int, str], None] | None = None,
        resumed_at: int | None = None,
    ):
        self.every = every
        self._path, self._sample, self._log = Path(path), sample, log
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self._path, resumed_at)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Write a sample."""
        text = self._sample(state)
        quoted = _HEAD.sub(r" \g<0>", text)  # a sample may contain a heading
        with open_regular(self._path, "ab") as file:
            file.write(f"=== step {step} ===\n{quoted}\n\n".encode("utf-8", "replace"))
        if self._log is not None:
            self._log(step, text)


def _truncate(path: Path, resumed_at: int | None) -> None:
    """Remove the samples after a step, and an incomplete last line."""
    found = read_bytes(path, most=MAX_BYTES, inside=path.parent) if path.exists() else b""
    text, end = found.decode("utf-8", "replace"), 0
    text = text[: text.rfind("\n") + 1]  # the last line may be incomplete
    if resumed_at is not None:
        later = (m.start() for m in _HEAD.finditer(text) if int(m[1]) > resumed_at)
        end = next(later, len(text))
    content = text[:end].encode()
    if content != found:
        atomic_write(path, content)
