"""Save retries: try again, make room, and end the run at the third failure."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jtrain.checkpoint.leaf_table import flatten
from jtrain.checkpoint.manager import CheckpointManager
from jtrain.checkpoint.save_errors import SaveError, write_error
from jtrain.io.log import LOG

TRIES = 3


class SaveRetries:
    """Retries for a run that survives a failed save, and does not train on without saves.

    The first failed save is logged, and the next state is saved in its place. If that fails too for
    lack of space, all checkpoints but the newest and the best are deleted. The third failure in a
    row raises. A run of several processes ends at the first failure, because its processes would
    have to agree: the launcher restarts them.
    """

    def __init__(self, checkpoints: CheckpointManager):
        self._checkpoints, self._failures, self._due = checkpoints, 0, False

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
        """Save like `CheckpointManager.save`, after the last save has succeeded or failed.

        Args:
            before: writes what must be on the disk first; if it raises OSError, the save has
                failed.

        Raises:
            SaveError: at the third failure in a row.
        """
        self.last_save_failed()  # waits for it
        self._due = False

        def attempt() -> None:
            try:
                before()
            except OSError as error:
                raise write_error(
                    self._checkpoints.directory, step, flatten(state), error
                ) from None
            self._checkpoints.save(step, state, about, best_value, sealed)

        self._try(attempt)

    def is_due(self) -> bool:
        """Return whether the last save has failed and another is due; never wait.

        Raises:
            SaveError: at the third failure in a row.
        """
        self._try(self._checkpoints.check)
        return self._due

    def last_save_failed(self) -> bool:
        """Wait for the last save; return whether it has failed and another is due."""
        if self._try(self._checkpoints.wait) and not self._due:
            self._failures = 0
        return self._due

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
            return True
        except SaveError as error:
            self._failures += 1
            if self._failures == TRIES or jax.process_count() > 1:
                raise
            self._due = True
            LOG.warning(f"{error.what}. Training continues: the next state is saved in its place.")
            if self._failures == TRIES - 1 and error.room:
                deleted = ", ".join(map(str, self._checkpoints.make_room()))
                if deleted:
                    LOG.warning(f"deleted to make room for a newer checkpoint: {deleted}")
            return False
