"""Looking at a step or at a run: plans, debugging, reports."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.inspect.debug.find_nan import NonfiniteTrace as NonfiniteTrace
    from jtrain.inspect.report import read_run as read_run
    from jtrain.inspect.report import render_page as render_page
else:
    __getattr__, __dir__ = lazy_names(__name__)
