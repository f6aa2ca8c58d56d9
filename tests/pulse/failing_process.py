"""One of several processes that join and wait in a sum, but for the second. Not a test itself."""

import os
import sys

from jax.experimental import multihost_utils

from jtrain.cluster import detect, start
from jtrain.errors import DataError


def main(kind: str) -> None:
    """Fails in the second process, by an error of Python's or one of jtrain's."""
    start(detect(os.environ), {}, timeout=60.0)
    multihost_utils.sync_global_devices("both are here")
    if os.environ["JTRAIN_PROCESS"] == "1":
        raise {"python": RuntimeError, "jtrain": DataError}[kind]("nobody catches this")
    multihost_utils.sync_global_devices("only one is here")


if __name__ == "__main__":
    main(sys.argv[1])
