"""One class for each thing a user can fix: what was asked, what was found, what to type.

`jtrain` prints the message of any of these without a traceback and exits with its `code`. A
notebook shows the user's own frames and the message.
"""

from jtrain.errors.tracebacks import frame_lines

# Exit codes: it is done; what was typed is wrong; running again may mend it; the same command goes
# on; it was stuck and was ended.
DONE, MISTAKE, FAULT, STOPPED, HUNG = 0, 2, 70, 75, 124


class UserError(ValueError):
    """Something that the person at the keyboard can mend; never a fault of ours."""

    code = MISTAKE

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in the place of its own traceback."""
        frames = frame_lines(self.__traceback__)
        return [*frames.splitlines(), f"{type(self).__name__}: {self}"]


class ConfigError(UserError):
    """A config or an override says something that cannot be."""


class DataError(UserError):
    """The data is not what the config says it is."""


class LossError(UserError):
    """A loss, a model or a metric does not keep its contract."""


class CodeError(UserError):
    """A function of the user's failed: its own frames, what happened, what to type."""


class ShardingError(UserError):
    """An array cannot be laid out over the devices as the strategy asks."""


class CheckpointError(UserError):
    """A checkpoint is not there, not whole, or of another shape."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was saved: not to be mended by typing."""

    code = FAULT


class RetraceError(UserError):
    """A compiled step was given arrays of another shape, dtype or structure."""


class PeerError(Exception):
    """Another process of the run is not there, or ended: not to be mended in this one."""

    code = FAULT


class DeviceError(Exception):
    """A device computed or kept another number than it should: not to be mended by typing."""

    code = FAULT
