"""Writes what a model makes, at a cadence, into a file that people read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.core.loop import Hook
from jtrain.core.types import Metrics
from jtrain.io.atomic_write import atomic_write
from jtrain.io.regular_files import open_regular, read_bytes

MOST = 1 << 30  # bytes of samples
_HEAD = re.compile(r"^=== step (\d+) ===$", re.MULTILINE)


class Samples(Hook):
    """Adds a sample after steps `every`, 2 `every`, ... to a file, each under `=== step 300 ===`.

    Args:
        path: the file; it is begun anew unless the run resumes.
        every: steps.
        sample: a state -> a text; it does not keep the state.
        tell: takes the step and the text too, to show it.
        resumed_at: the step of the checkpoint that the run goes on from: later samples go, as they
            will be made again. None at the beginning of a run.
    """

    settles = True  # so that its time is not taken for that of the steps before it

    def __init__(
        self,
        path: Path | str,
        *,
        every: int,
        sample: Callable[[Any], str],
        tell: Callable[[int, str], None] | None = None,
        resumed_at: int | None = None,
    ):
        self.every = every
        self._path, self._sample, self._tell = Path(path), sample, tell
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _mend(self._path, resumed_at)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Writes a sample."""
        text = self._sample(state)
        quoted = _HEAD.sub(r" \g<0>", text)  # a model may write anything
        with open_regular(self._path, "ab") as file:
            file.write(f"=== step {step} ===\n{quoted}\n\n".encode("utf-8", "replace"))
        if self._tell is not None:
            self._tell(step, text)


def _mend(path: Path, resumed_at: int | None) -> None:
    found = read_bytes(path, most=MOST, inside=path.parent) if path.exists() else b""
    text, end = found.decode("utf-8", "replace"), 0
    text = text[: text.rfind("\n") + 1]  # the last line may be torn
    if resumed_at is not None:
        later = (m.start() for m in _HEAD.finditer(text) if int(m[1]) > resumed_at)
        end = next(later, len(text))
    kept = text[:end].encode()
    if kept != found:
        atomic_write(path, kept)
