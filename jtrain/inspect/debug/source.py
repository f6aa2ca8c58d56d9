"""Source lines of the equations of traced programs."""

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.errors import LIBRARIES

# Frames in these folders are not the user's code.
_LIBRARIES = (str(Path(jax.__file__).parent), *LIBRARIES)
_TOOLKIT = str(Path(__file__).parents[2])
# They only call what the user wrote.
_CALLERS = tuple(str(Path(_TOOLKIT, folder)) for folder in ("inspect/debug", "models/adapters"))


class SourceLine(NamedTuple):
    """A line of code in a function."""

    file: str
    line: int
    function: str

    @property
    def name(self) -> str:
        """Name of the function without its class."""
        return self.function.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def in_jtrain(self) -> bool:
        """True if the line is in this package."""
        return self.file.startswith(_TOOLKIT)

    def __str__(self) -> str:
        file, folder = Path(self.file), Path.cwd()
        shown = file.relative_to(folder) if file.is_relative_to(folder) else file
        text = f": {self.text}" if self.text else ""
        return f"{shown}:{self.line} in {self.function.rpartition('.')[2]}{text}"


def find_source(
    equation: Any, calls: Sequence[Any] = (), skip: tuple[str, ...] = ()
) -> list[SourceLine]:
    """Return the innermost line outside of libraries, preceded by the line of jtrain that it calls.

    The list has one line if the experiment calls JAX itself, and none if nothing is known.

    Args:
        calls: the equations around it, outermost first. A jitted function is traced at its first
            call, so its equations have the lines inside, and the call its own line.
        skip: files and folders whose lines do not count.
    """
    ours, jitted = None, [call for call in reversed(calls) if "name" in call.params]
    for inner, call in zip([equation, *jitted], [*jitted, None], strict=True):
        for line in _within(_lines(inner), call):
            if line.file.startswith(skip):
                continue
            if not line.file.startswith(_TOOLKIT):
                return [ours, line] if ours else [line]
            if ours is None and not line.file.startswith(_CALLERS):
                ours = line
    return [ours] if ours else []


def _lines(equation: Any) -> list[SourceLine]:
    """Return the lines of an equation's traceback, innermost first."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    return [
        SourceLine(f.file_name, f.line_num, f.function_name) for f in getattr(trace, "frames", ())
    ]


def _within(lines: list[SourceLine], call: Any) -> list[SourceLine]:
    """Return the lines outside of libraries, up to the called function."""
    name = call.params["name"] if call is not None else None
    ends = [i for i, line in enumerate(lines) if name and line.name == name]
    lines = lines[: ends[0] + 1] if ends else [] if name else lines
    return [line for line in lines if not line.file.startswith((*_LIBRARIES, "<"))]


def find_raise(error: BaseException) -> SourceLine | None:
    """Return the innermost line outside of libraries that an exception passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [SourceLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    excluded = (*_LIBRARIES, _TOOLKIT, "<")
    return next((line for line in reversed(lines) if not line.file.startswith(excluded)), None)
