"""One of several processes that join and wait in a sum, but for the second. Not a test itself."""

import os
import sys

from jax.experimental import multihost_utils

from jtrain.distributed.cluster import detect, start
from jtrain.distributed.heartbeat.exit_alone import exit_alone, fail_alone
from jtrain.errors import DataError


def fails(how: str) -> None:
    """Ends this process, by an error that nobody catches or without one."""
    if how == "closed":
        sys.stdout.close()
    if how == "again":  # something else listens to errors since, and the run begins after it
        ours = sys.excepthook
        sys.excepthook = lambda *told: ours(*told)
        fail_alone()
    if how == "code":
        exit_alone(7)
    raise DataError("nobody catches this") if how == "jtrain" else RuntimeError("nobody catches it")


def main(how: str) -> None:
    """Fails in the second process."""
    start(detect(os.environ), {}, timeout=60.0)
    multihost_utils.sync_global_devices("both are here")
    if os.environ["JTRAIN_PROCESS"] == "1":
        fails(how)
    multihost_utils.sync_global_devices("only one is here")


if __name__ == "__main__":
    main(sys.argv[1])
