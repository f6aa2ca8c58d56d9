"""Source lines of the equations of a nested trace."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.inspect.debug.source import SourceLine, find_source


class CallStack:
    """The stack of calls around the current equation, for its source line."""

    def __init__(self) -> None:
        self._calls: list[Any] = []

    @contextlib.contextmanager
    def inside(self, call: Any) -> Iterator[None]:
        """Push an equation that calls a program while the program is walked."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()

    def line(self, equation: Any) -> str:
        """Return the innermost line of the loss, `losses.py:12`; empty if unknown."""
        line = self._lines(equation)[-1:]
        return f"{Path(line[0].file).name}:{line[0].line}" if line else ""

    def in_jtrain(self, equation: Any) -> bool:
        """Return whether jtrain's own code emitted an equation, not the loss that called jtrain."""
        return any(line.in_jtrain for line in self._lines(equation)[:1])

    def _lines(self, equation: Any) -> list[SourceLine]:
        """Return the line of jtrain, if there is one, and the line of the loss."""
        jitted = [call for call in self._calls if "name" in call.params]
        lines = find_source(equation, jitted)
        for call in reversed(self._calls):
            if lines and not lines[-1].in_jtrain:
                break
            lines = [*lines[:1], *(line for line in find_source(call) if not line.in_jtrain)]
        return lines
