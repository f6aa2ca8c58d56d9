"""Steps that were skipped because their batch holds NaN or infinity: the rows, and an end to it."""

from collections.abc import Callable, Mapping
from typing import Any

from jtrain.core.loop import Hook, Stop

SHARE, LEAST, NAMED = 0.1, 5, 3  # of the steps; steps; rows that are named


class NonfiniteData(Hook):
    """Names the rows that are not finite, and stops a run that they cost a tenth of its steps.

    A row of a large data set costs one step of an epoch, and is named. A small data set would train
    on and on without the batches that such a row comes into.

    Args:
        every: steps between two looks; they decide where a run ends, so not what is logged.
        find: gives what is not finite in the data of a step, the first being 1, and where, in
            words; empty where all is.
        tell: takes a line of warning.
        known: what `state` gave when the checkpoint was saved.
    """

    last = True

    def __init__(
        self,
        *,
        every: int,
        find: Callable[[int], str],
        tell: Callable[[str], None],
        known: Mapping[str, Any] = {},
    ):
        self.every, self._find, self._tell = every, find, tell
        self._steps: int = known.get("steps", 0)
        self._named = dict.fromkeys(known.get("named", ()))
        self._cause: str = known.get("cause", "")

    def skipped(self, step: int) -> None:
        """Look for what is not finite in the batch of a step that was skipped."""
        self._cause = self._find(step)
        if not self._cause:
            return
        self._steps += 1
        if self._cause not in self._named and len(self._named) < NAMED:
            self._named[self._cause] = None
            self._tell(f"step {step} was skipped: {self._cause}. {self._what_to_do()}")

    def cause(self) -> str:
        """Return why the last of the skipped steps was, if its batch says so; else nothing."""
        return self._cause

    def state(self) -> dict[str, Any]:
        """Return JSON of which another one of these goes on."""
        return {"steps": self._steps, "named": list(self._named), "cause": self._cause}

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Stop where such rows cost too many steps."""
        del numbers
        if self._steps < max(LEAST, SHARE * step):
            return None
        return Stop(
            f"{self._steps} of {step} steps were skipped because the data is not finite: "
            f"{', '.join(self._named)}. {self._what_to_do()}",
            "failed",
        )

    def _what_to_do(self) -> str:
        array = self._cause.partition("`")[2].partition("`")[0]
        return f"Leave such rows out, or fill them: {array} = np.nan_to_num({array})."
