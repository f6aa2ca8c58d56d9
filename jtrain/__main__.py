"""`jtrain` and `python -m jtrain`."""

import sys
from typing import NoReturn

from jtrain.cli import leave, main
from jtrain.cli.output import outlive_readers
from jtrain.distributed.heartbeat.early_signals import leave_when_asked


def begin() -> NoReturn:
    """Does what was typed, and ends the process."""
    verb = "".join(sys.argv[1:2])
    if verb == "run":  # before anything is imported that takes time
        leave_when_asked()  # a run takes the signals over
    if verb in {"run", "launch"}:
        outlive_readers()
    leave(main())


if __name__ == "__main__":
    begin()
