"""`jtrain` and `python -m jtrain`."""
# PYTHON_ARGCOMPLETE_OK

import importlib
import os
import sys
from typing import NoReturn

from jtrain.cli import leave, main
from jtrain.cli.output import fill_closed_streams, outlive_readers
from jtrain.distributed.heartbeat import connect_heartbeat
from jtrain.distributed.shutdown import exit_on_early_signals
from jtrain.io.environment import distrust_current_directory


def begin() -> NoReturn:
    """Run the command line and exit."""
    distrust_current_directory()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words that may follow
        importlib.import_module("jtrain.cli.completion").complete()
    fill_closed_streams()
    connect_heartbeat()
    verb = "".join(sys.argv[1:2])
    if verb == "run":  # before the slow imports
        exit_on_early_signals()  # a run installs its own handlers later
    if verb in {"run", "launch"}:
        outlive_readers()
    leave(main())


if __name__ == "__main__":
    begin()
