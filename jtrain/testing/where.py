"""The line of a loss that wrote an equation, while its trace is walked through."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.inspect.debug.source import SourceLine, written


class CallStack:
    """The calls that a walk is inside of, and lines by them."""

    def __init__(self) -> None:
        self._around: list[Any] = []

    @contextlib.contextmanager
    def inside(self, call: Any) -> Iterator[None]:
        """Walk through the program that an equation calls."""
        self._around.append(call)
        try:
            yield
        finally:
            self._around.pop()

    def line(self, equation: Any) -> str:
        """Return `losses.py:12`, the innermost line of the loss; empty where none is known."""
        line = self._lines(equation)[-1:]
        return f"{Path(line[0].file).name}:{line[0].line}" if line else ""

    def in_jtrain(self, equation: Any) -> bool:
        """Whether jtrain wrote an operation, and not the loss that called jtrain."""
        return any(line.in_jtrain for line in self._lines(equation)[:1])

    def _lines(self, equation: Any) -> list[SourceLine]:
        """That of jtrain, where there is one, and that of the loss."""
        jitted = [call for call in self._around if "name" in call.params]
        lines = written(equation, jitted)
        for call in reversed(self._around):
            if lines and not lines[-1].in_jtrain:
                break
            lines = [*lines[:1], *(line for line in written(call) if not line.in_jtrain)]
        return lines
