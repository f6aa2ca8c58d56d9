"""Script of processes that join and wait in a collective; the second fails. Not a test."""

import os
import sys

from jax.experimental import multihost_utils

from jtrain.distributed.cluster import detect, start
from jtrain.distributed.heartbeat.exit_alone import exit_alone, fail_alone
from jtrain.errors import DataError


def fail(how: str) -> None:
    """End this process, by an uncaught error or by an exit code."""
    if how == "closed":
        sys.stdout.close()
    if how == "again":  # another excepthook is installed, and then a run begins
        ours = sys.excepthook
        sys.excepthook = lambda *told: ours(*told)
        fail_alone()
    if how == "code":
        exit_alone(7)
    raise DataError("nobody catches this") if how == "jtrain" else RuntimeError("nobody catches it")


def main(how: str) -> None:
    """Join, and fail in the second process."""
    start(detect(os.environ), {}, timeout=60.0)
    multihost_utils.sync_global_devices("both are here")
    if os.environ["JTRAIN_PROCESS"] == "1":
        fail(how)
    multihost_utils.sync_global_devices("only one is here")


if __name__ == "__main__":
    main(sys.argv[1])
