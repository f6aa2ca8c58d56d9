"""Errors that a user can fix, each with what was asked, what was found and what to type.

`jtrain` prints the message of any of these without a traceback and exits with its `code`. A
notebook shows the user's own frames and the message.
"""

from jtrain.errors.tracebacks import frame_lines

# Exit codes: done; an error in what was typed; an error that another try may not have; stopped,
# and the same command resumes; ended because it made no progress.
DONE, MISTAKE, FAULT, STOPPED, HUNG = 0, 2, 70, 75, 124


class UserError(ValueError):
    """Error that the user can fix; never a fault of jtrain."""

    code = MISTAKE

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in the place of its own traceback."""
        frames = frame_lines(self.__traceback__)
        return [*frames.splitlines(), f"{type(self).__name__}: {self}"]


class ConfigError(UserError):
    """Invalid value in a config or an override."""


class DataError(UserError):
    """Data that does not match the config."""


class LossError(UserError):
    """Loss, model or metric that breaks its contract."""


class CodeError(UserError):
    """Failure in a user's function, with the user's frames and what to type."""


class ShardingError(UserError):
    """Array that cannot be sharded over the devices as the strategy asks."""


class CheckpointError(UserError):
    """Checkpoint that is missing, incomplete or of another shape."""


class DamagedError(CheckpointError):
    """Checkpoint whose bytes are not those that were saved; no command repairs it."""

    code = FAULT


class UnreachableError(UserError):
    """File that the system does not let this process read now: nothing is known of its bytes."""

    code = FAULT


class RetraceError(UserError):
    """Arrays of another shape, dtype or structure than the compiled step takes."""


class PeerError(Exception):
    """Missing or ended process of the run; this process cannot fix it."""

    code = FAULT


class DeviceError(Exception):
    """Wrong number computed or stored by a device; no command repairs it."""

    code = FAULT
