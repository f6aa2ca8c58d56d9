"""Where an equation of a traced program was written."""

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.errors.tracebacks import LIBRARIES

# Frames of these are no places to look in for what a user wrote.
_LIBRARIES = (str(Path(jax.__file__).parent), *LIBRARIES)
_TOOLKIT, _DEBUG = str(Path(__file__).parents[2]), str(Path(__file__).parent)


class SourceLine(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    @property
    def name(self) -> str:
        """The function's own."""
        return self.function.rpartition(".")[2]

    @property
    def text(self) -> str:
        """What is written there; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def in_jtrain(self) -> bool:
        """Whether it is a line of this package."""
        return self.file.startswith(_TOOLKIT)

    def __str__(self) -> str:
        file, here = Path(self.file), Path.cwd()
        shown = file.relative_to(here) if file.is_relative_to(here) else file
        written = f": {self.text}" if self.text else ""
        return f"{shown}:{self.line} in {self.function.rpartition('.')[2]}{written}"


def written(equation: Any, calls: Sequence[Any] = ()) -> list[SourceLine]:
    """The innermost line outside of libraries, and before it that of jtrain which it called.

    One line where the experiment called JAX itself; none where nothing is known.

    Args:
        equation: of a traced program.
        calls: of jitted functions around it, the outermost first. What is inside of one was traced
            at its first call, so its own lines say where it is, and the call where it was called.
    """
    ours = None
    for here, call in zip([equation, *reversed(calls)], [*reversed(calls), None], strict=True):
        for line in _within(_lines(here), call):
            if not line.file.startswith(_TOOLKIT):
                return [ours, line] if ours else [line]
            if ours is None and not line.file.startswith(_DEBUG):
                ours = line
    return [ours] if ours else []


def _lines(equation: Any) -> list[SourceLine]:
    """Where it was written, the innermost first."""
    trace = getattr(getattr(equation, "source_info", None), "traceback", None)
    return [
        SourceLine(f.file_name, f.line_num, f.function_name) for f in getattr(trace, "frames", ())
    ]


def _within(lines: list[SourceLine], call: Any) -> list[SourceLine]:
    """Those outside of libraries, up to the function that was called."""
    name = call.params["name"] if call is not None else None
    ends = [i for i, line in enumerate(lines) if name and line.name == name]
    lines = lines[: ends[0] + 1] if ends else [] if name else lines
    return [line for line in lines if not line.file.startswith((*_LIBRARIES, "<"))]


def raised_at(error: BaseException) -> SourceLine | None:
    """Return the innermost line outside of libraries that an exception passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [SourceLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    theirs = (*_LIBRARIES, _TOOLKIT, "<")
    return next((line for line in reversed(lines) if not line.file.startswith(theirs)), None)


def backward(equation: Any) -> bool:
    """Whether it belongs to the gradient and not to the loss."""
    return "transpose(" in str(getattr(getattr(equation, "source_info", None), "name_stack", ""))
