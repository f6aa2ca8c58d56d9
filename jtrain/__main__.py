"""`jtrain` and `python -m jtrain`."""

import sys
from typing import NoReturn

from jtrain.cli import leave, main
from jtrain.pulse.leaving import leave_when_asked


def begin() -> NoReturn:
    """Does what was typed, and ends the process."""
    if sys.argv[1:2] == ["run"]:  # before anything is imported that takes time
        leave_when_asked()  # a run takes the signals over
    leave(main())


if __name__ == "__main__":
    begin()
