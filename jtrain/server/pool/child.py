"""Child processes of a pool: how they are started, and what they read of it."""

import json
import os
import sys

from jtrain.server.engines.engine import LocalProcess

MOST = 1 << 36  # bytes of the arrays of a message
_PORT, _TOKEN, _PATH = "JTRAIN_POOL_PORT", "JTRAIN_POOL_TOKEN", "JTRAIN_POOL_PATH"


def start_child(module: str, index: int, *, port: int, token: str) -> LocalProcess:
    """Start a program of this package, on the CPU unless JAX_PLATFORMS says otherwise."""
    command = [sys.executable, "-m", f"jtrain.server.pool.{module}", f"{index}"]
    given = {_PORT: f"{port}", _TOKEN: token, _PATH: json.dumps(sys.path)}
    return LocalProcess(command, {"JAX_PLATFORMS": "cpu", **os.environ, **given})


def enter_child() -> tuple[int, str]:
    """Take over the import path of the process that has started this one; return port and token."""
    sys.path[:] = json.loads(os.environ[_PATH])
    return int(os.environ[_PORT]), os.environ[_TOKEN]
