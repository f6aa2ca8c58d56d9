"""Guard of a private Ray cluster: a program that ends it once its launcher is gone.

Ray's own processes notice the end of their launcher, some of them within a minute. The guard waits
for the end of its input, which the launcher holds, kills what is left of the cluster and removes
its folder. It imports nothing but the standard library, and runs without site-packages.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

WAIT = 10.0  # seconds for the killed processes to disappear


@contextlib.contextmanager
def guarded(folder: str) -> Iterator[None]:
    """Let the guard end the cluster in `folder` after a `with` block, or when this process ends."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # signals to the launcher's group do not reach it
    )
    assert guard.stdin is not None, "it has a pipe"
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


def end_cluster(folder: str) -> None:
    """Kill the processes of a cluster, and remove its folder."""
    deadline = time.monotonic() + WAIT
    while (left := list(_processes(folder))) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _processes(folder: str) -> Iterator[int]:
    """Yield the numbers of the cluster's processes; none where there is no /proc.

    They have the folder in their environment or arguments, or a log in it open: some of Ray's
    overwrite their environment by a title.
    """
    others = {os.getpid(), os.getppid()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) not in others and _belongs(process, folder):
                yield int(process.name)


def _belongs(process: Path, folder: str) -> bool:
    if process.stat().st_uid != os.getuid():
        return False
    for name in ("environ", "cmdline"):
        if folder.encode() in (process / name).read_bytes():
            return True
    return any(os.readlink(file).startswith(f"{folder}/") for file in (process / "fd").iterdir())


if __name__ == "__main__":
    sys.stdin.read()
    end_cluster(sys.argv[1])
