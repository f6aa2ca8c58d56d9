"""`jtrain` and `python -m jtrain`."""

from jtrain.cli import leave, main

if __name__ == "__main__":
    leave(main())
