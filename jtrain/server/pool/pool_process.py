"""The program of a worker of a `ClusterCoordinator`.

`python -m jtrain.server.pool.pool_process 0` starts the first one.
"""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.errors import DONE, FAULT, PeerError
from jtrain.server.pool.child import MOST, enter_child
from jtrain.server.transport.client import Client
from jtrain.server.transport.wire import Message

FRAMES = 20  # of a traceback that are sent
MOST_WORDS = 20_000  # characters of an error


def main(argv: Sequence[str]) -> int:
    """Compute what the coordinator sends until it ends; return the exit code."""
    port, token = enter_child()
    options = {"most": MOST, "timeout": 3600.0, "patience": 10.0}
    client = Client("the coordinator", port, token=token, **options)
    own = {"worker": int(argv[0]), "pid": os.getpid()}
    # The coordinator starts `prctl` first, which becomes this program: the same process id.
    try:
        while True:
            call = client.call(Message("next", own))
            if call.name == "end":
                return DONE
            if call.name == "call":
                client.call(compute(call, own))
    except PeerError as error:
        sys.stderr.write(f"{error}\n")
        return FAULT


def compute(call: Message, own: Mapping[str, Any]) -> Message:
    """Return the result of a call, or its error, for the coordinator."""
    from jtrain.server.pool import parameter_servers
    from jtrain.server.pool.values import decode, encode, load_function

    fields = call.fields
    reply = {**own, "item": fields["item"]}
    author = f"{fields['token']}:{fields['item']}"
    try:
        function = load_function(fields["function"])
        with parameter_servers.pushing_as(author, (fields["token"], fields["low"])):
            args, kwargs = decode(fields["given"], list(call.arrays))
            result = function(*args, **kwargs)
            value, arrays = encode(result, f"the result of {fields['function']}")
        return Message("result", {**reply, "value": value}, arrays)
    except Exception as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[1:][-FRAMES:])
        found = {"kind": type(error).__name__, "why": str(error)[:MOST_WORDS]}
        return Message("error", {**reply, **found, "frames": frames[-MOST_WORDS:]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
