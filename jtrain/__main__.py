"""`jtrain` and `python -m jtrain`."""

from typing import NoReturn

from jtrain.cli import leave, main


def begin() -> NoReturn:
    """Does what was typed, and ends the process."""
    leave(main())


if __name__ == "__main__":
    begin()
