"""A run that is killed, as `kill -9` does it, before it sends an object for the KILL_AT-th time."""

import os
import signal
import sys

from jtrain.cli import main
from jtrain.io.object_store import ObjectStore

if __name__ == "__main__":
    send, left = ObjectStore.send, [int(os.environ.get("KILL_AT", "0")) or 1 << 30]

    def send_or_die(*args):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*args)

    setattr(ObjectStore, "send", send_or_die)  # noqa: B010  its signature is another
    sys.exit(main(sys.argv[1:]))
