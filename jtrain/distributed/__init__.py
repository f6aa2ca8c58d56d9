"""Processes of a run: how they meet, exchange data, are watched and are started."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.distributed.accelerators import install_extra as install_extra
    from jtrain.distributed.cluster import detect as detect
    from jtrain.distributed.cluster import start as start
    from jtrain.distributed.shutdown import exit_alone as exit_alone
else:
    __getattr__, __dir__ = lazy_names(__name__)
