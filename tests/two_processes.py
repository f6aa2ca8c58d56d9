"""A script run by two processes of one run, on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.distributed.port import free_port


def in_two_processes(
    script: Path, words: Callable[[str, int], Sequence[str | Path]], *, patience: float
) -> None:
    """Runs `script` in both to its end, warnings being errors; what one complains of fails it.

    Args:
        words: what is typed after the script, of the coordinator's port and the process's number.
        patience: seconds for each.
    """
    port = str(free_port())
    command = [sys.executable, "-W", "error", str(script)]
    helpers = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # those of tests/
    processes = [
        subprocess.Popen(
            [*command, *map(str, words(port, index))],
            env={**os.environ, "PYTHONPATH": helpers},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            _, complaints = process.communicate(timeout=patience)
            assert process.returncode == 0, complaints
    finally:
        for process in processes:
            process.kill()  # a process of jax.distributed does not end at SIGTERM
            process.communicate()
