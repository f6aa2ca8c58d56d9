"""What a run has lost of its files to others, while it wrote them or between two starts."""

from collections.abc import Callable

from jtrain.io.message_backlog import MessageBacklog


class LostFiles:
    """Takes a line for each loss, tells it once, and keeps it for the end of the run.

    A run whose files were removed or cut takes its steps all the same, and fails at its end. The
    same command then finds the files as they are, and has nothing more to say.
    """

    def __init__(self):
        self.found: list[str] = []
        """The losses, which the run fails by."""
        self._told = MessageBacklog()

    def __call__(self, line: str) -> None:
        """Take a line; on any thread."""
        if line not in self.found:
            self.found.append(line)
            self._told(f"LOST: {line}")

    def tell_by(self, tell: Callable[[str], object]) -> None:
        """Have each line told to `tell`, those that were found before among them."""
        self._told.tell_by(tell)

    @property
    def why(self) -> str:
        """Why the run fails; empty if nothing was lost."""
        if not self.found:
            return ""
        return (
            f"files of the run were removed or changed by others: {'; '.join(self.found)}. All "
            f"steps were taken; the same command ends well from now on"
        )
