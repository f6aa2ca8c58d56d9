"""`jtrain` and `python -m jtrain`."""

import sys

from jtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
