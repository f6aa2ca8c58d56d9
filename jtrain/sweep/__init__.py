"""Sweeps: several runs of one config that differ in their settings, by a grid or a search."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.sweep.members import parse_grid as parse_grid
else:
    __getattr__, __dir__ = lazy_names(__name__)
