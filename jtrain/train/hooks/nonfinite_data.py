"""Check for non-finite data: the rows of skipped steps are named, and too many end the run."""

from collections.abc import Callable, Mapping
from typing import Any

from jtrain.core.loop import Hook, Stop

SHARE = 0.1  # of all steps, that may be skipped for such rows
MIN_STEPS, MAX_NAMED = 5, 3  # steps before the run may end; rows that are named


class NonfiniteData(Hook):
    """Hook that names rows that are not finite, and stops a run if they cost a tenth of its steps.

    In a large data set such a row costs one step of an epoch, and is named. In a small data set it
    would keep a large share of the batches out of training.

    Args:
        every: steps between two checks; independent of the logging, since it decides where a run
            ends.
        find: describes what is not finite in the data of a step (the first is 1), and where; ""
            if all is finite.
        log: takes a line of warning.
        known: the result of `state` in the checkpoint.
    """

    last = True

    def __init__(
        self,
        *,
        every: int,
        find: Callable[[int], str],
        log: Callable[[str], None],
        known: Mapping[str, Any] = {},
    ):
        self.every, self._find, self._log = every, find, log
        self._steps: int = known.get("steps", 0)
        self._named = dict.fromkeys(known.get("named", ()))
        self._cause: str = known.get("cause", "")

    def skipped(self, step: int) -> None:
        """Look for values that are not finite in the batch of a skipped step."""
        self._cause = self._find(step)
        if not self._cause:
            return
        self._steps += 1
        if self._cause not in self._named and len(self._named) < MAX_NAMED:
            self._named[self._cause] = None
            self._log(f"step {step} was skipped: {self._cause}. {self._advice()}")

    def cause(self) -> str:
        """Return why the last skipped step was skipped, if its batch is the cause; else ""."""
        return self._cause

    def state(self) -> dict[str, Any]:
        """Return JSON that another instance can resume from."""
        return {"steps": self._steps, "named": list(self._named), "cause": self._cause}

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Stop the run if such rows cost too many steps."""
        del numbers
        if self._steps < max(MIN_STEPS, SHARE * step):
            return None
        return Stop(
            f"{self._steps} of {step} steps were skipped because the data is not finite: "
            f"{', '.join(self._named)}. {self._advice()}",
            "failed",
        )

    def _advice(self) -> str:
        array = self._cause.partition("`")[2].partition("`")[0]
        return f"Remove such rows, or fill them: {array} = np.nan_to_num({array})."
