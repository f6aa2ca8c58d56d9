"""Schedule of streaming DiLoCo: after which steps each fragment is pushed, and merged."""

import dataclasses
import itertools
from typing import NamedTuple


class StreamingRound(NamedTuple):
    """Steps of all workers that end with a push, or where the run reads the state."""

    first: int
    last: int
    pushes: tuple[int, ...]
    """Fragments that are pushed after the last step."""
    merge: int | None
    """Fragment, pushed earlier, that is pulled and merged in this round."""
    merge_before: int
    """Step before which it is."""
    pushed_at: int
    """Step after which it was pushed."""


@dataclasses.dataclass(frozen=True)
class FragmentSchedule:
    """Times at which fragments are pushed and merged, as functions of the step.

    Fragment p of P is pushed after steps H (p + 1) / P, rounded down, of each H. It is merged
    `overlap` steps later. After the last step of the run every fragment is pushed.
    """

    inner_steps: int
    fragments: int
    overlap: int
    stop: int
    """The last step of the run."""

    @property
    def shortest(self) -> int:
        """Fewest steps between two pushes."""
        ends = [0, *self._offsets]
        return min(b - a for a, b in itertools.pairwise(ends))

    def round_after(self, done: int, limit: int) -> StreamingRound:
        """Return the round that begins after step `done` and ends at `limit` at the latest."""
        first, (boundary, fragment) = done + 1, self._next_push(done)
        last = min(boundary, limit)
        before = self._last_push(done)
        merge, merge_before, pushed_at = None, 0, 0
        waiting = set()  # pushed, and not merged
        if before is not None:
            merge_before, pushed_at = before[0] + self.overlap + 1, before[0]
            if first <= merge_before <= last:
                merge = before[1]
            elif merge_before > last:
                waiting.add(before[1])
        pushes = (fragment,) if last == boundary else ()
        if last == self.stop:  # what workers have learned since is in no server yet
            pushes = tuple(p for p in range(self.fragments) if p in pushes or p not in waiting)
        return StreamingRound(first, last, pushes, merge, merge_before, pushed_at)

    @property
    def _offsets(self) -> list[int]:
        return [self.inner_steps * (p + 1) // self.fragments for p in range(self.fragments)]

    def _next_push(self, done: int) -> tuple[int, int]:
        """Return the step of the first push after `done`, and its fragment."""
        period = done // self.inner_steps * self.inner_steps
        return min(
            (start + offset, fragment)
            for start in (period, period + self.inner_steps)
            for fragment, offset in enumerate(self._offsets)
            if start + offset > done
        )

    def _last_push(self, done: int) -> tuple[int, int] | None:
        """Return the step of the last push up to `done`, and its fragment."""
        period = done // self.inner_steps * self.inner_steps
        found = [
            (start + offset, fragment)
            for start in (period - self.inner_steps, period)
            for fragment, offset in enumerate(self._offsets)
            if 0 < start + offset <= done
        ]
        return max(found, default=None)
