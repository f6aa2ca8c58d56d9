"""What follows on a save that fails: another, another with older ones gone, the end of the run."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jtrain.checkpoint.leaf_table import flatten
from jtrain.checkpoint.manager import CheckpointManager
from jtrain.checkpoint.save_errors import SaveError, failed

TRIES = 3


class SaveRetries:
    """Saves for a run that rather goes on than ends, and rather ends than goes on without.

    The first save that fails is told and owed: the next state is saved in its place. Where that
    fails too, and it is room that is lacking, all checkpoints but the newest and the best are
    deleted. The third in a row raises. A run of several processes ends at the first, for they would
    have to agree: whoever started them starts them again.
    """

    def __init__(self, checkpoints: CheckpointManager, tell: Callable[[str], None]):
        """`tell` is given a line for each save that fails."""
        self._checkpoints, self._tell = checkpoints, tell
        self._failed, self._owed = 0, False
        checkpoints.tell.tell_by(tell)

    def save(
        self,
        step: int,
        state: Any,
        about: Mapping[str, Any],
        best_value: float | int | None = None,
        sealed: Callable[[int], None] = lambda step: None,
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """As `CheckpointManager.save`, once the last one has ended well or badly.

        Args:
            before: writes what has to be on the disk before; where it raises OSError, the save has
                failed.

        Raises:
            SaveError: if it is the third in a row that fails.
        """
        self.settle()
        self._owed = False

        def saves() -> None:
            try:
                before()
            except OSError as error:
                raise failed(self._checkpoints.directory, step, flatten(state), error) from None
            self._checkpoints.save(step, state, about, best_value, sealed)

        self._try(saves)

    def owed(self) -> bool:
        """Whether the last save has failed, and another one is to be begun; never waits.

        Raises:
            SaveError: if it is the third in a row that fails.
        """
        self._try(self._checkpoints.check)
        return self._owed

    def settle(self) -> bool:
        """The same, when the last save has come to its end."""
        if self._try(self._checkpoints.wait) and not self._owed:
            self._failed = 0
        return self._owed

    def _try(self, does: Callable[[], None]) -> bool:
        try:
            does()
            return True
        except SaveError as error:
            self._failed += 1
            if self._failed == TRIES or jax.process_count() > 1:
                raise
            self._owed = True
            self._tell(f"{error.what}. Training goes on: the next state is saved in its place.")
            if self._failed == TRIES - 1 and error.room:
                gone = ", ".join(map(str, self._checkpoints.spare()))
                if gone:
                    self._tell(f"checkpoint {gone} went, to make room for a newer one.")
            return False
