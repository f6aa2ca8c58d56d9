"""Live cell: the bar, the numbers and the loss curve of a run, redrawn in place in a notebook."""

import html
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from jtrain.core.loop import Hook
from jtrain.train.svg_chart import Points, chart


def has_rich_output() -> bool:
    """Return whether the cells of this process show HTML: whether it is a kernel of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class LiveCell:
    """Output of a cell that is replaced at each drawing, so that a long run adds nothing to it.

    Lines that are printed stand below it.
    """

    period = 0.5

    def __init__(self, stream: TextIO):
        self._stream, self._handle = stream, None

    def draw(self, done: int, of: int, text: str, curves: Mapping[str, Points]) -> None:
        """Redraw the bar and the text, with the curves under them."""
        from IPython.display import display

        data = {"text/html": _page(done, of, text, curves), "text/plain": text}
        if self._handle is None:
            self._handle: Any = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def print(self, line: str) -> None:
        """Print a line below the drawing."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last drawing in place."""
        self._stream.flush()


class LossCurve(Hook):
    """Hook that keeps the loss by step, at most `most` points over the whole run.

    Where there are more, each second one is dropped, and from then on each second one is kept.

    Args:
        every: steps between two points.
        earlier: points before the step that the run resumes from.
        valid: gives the losses of the validation set by step.
    """

    last = True
    most = 200

    def __init__(
        self,
        *,
        every: int,
        earlier: Points | None = None,
        valid: Callable[[], Points] = dict,
    ):
        self.every, self._valid = every, valid
        self._points: dict[int, float] = {}
        for step, loss in (earlier or {}).items():
            self.on_numbers(step, {"loss": loss})

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the loss of a step."""
        if "loss" not in numbers:
            return
        self._points[step] = numbers["loss"]
        if len(self._points) > self.most:
            self._points = dict(list(self._points.items())[::2])
            self.every *= 2

    def curves(self) -> Mapping[str, Points]:
        """Return the losses by set and step."""
        return {"train": self._points, "valid": self._valid()}


def _page(done: int, of: int, text: str, curves: Mapping[str, Points]) -> str:
    share = 100 * done / max(of, 1)
    return (
        '<div style="max-width:760px">'
        '<div style="height:6px;border-radius:3px;background:rgba(128,128,128,.25)">'
        f'<div style="height:6px;border-radius:3px;background:#1f77b4;width:{share:.1f}%"></div>'
        f'</div><code style="white-space:pre-wrap">{html.escape(text)}</code></div>'
        f"{chart('loss', curves)}"
    )
