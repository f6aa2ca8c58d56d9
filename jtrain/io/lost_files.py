"""Lost files: what other processes removed from a run, while it ran or between two starts."""

from collections.abc import Callable

from jtrain.io.message_backlog import MessageBacklog


class LostFiles:
    """Record of lost files: each loss is reported once, and fails the run at its end.

    A run whose files were removed or truncated still takes all its steps, and fails at its end. The
    same command then accepts the files as they are.
    """

    def __init__(self):
        self.found: list[str] = []
        """Losses, which fail the run."""
        self._messages = MessageBacklog()

    def __call__(self, line: str) -> None:
        """Record and report a loss; on any thread."""
        if line not in self.found:
            self.found.append(line)
            self._messages(f"LOST: {line}")

    def send_to(self, log: Callable[[str], object]) -> None:
        """Send each line to `log`, earlier ones included."""
        self._messages.send_to(log)

    @property
    def why(self) -> str:
        """Reason why the run fails; empty if nothing was lost."""
        if not self.found:
            return ""
        return (
            f"other processes removed or changed files of the run: {'; '.join(self.found)}. All "
            f"steps were taken; the same command succeeds from now on"
        )
