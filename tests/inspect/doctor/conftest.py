"""A process that holds a lock."""

import subprocess
import sys

import pytest
from fakes import write_files


@pytest.fixture
def holder(tmp_path):
    """A process that holds both kinds of lock on a file, and waits."""
    file = write_files(tmp_path, {"tmp/libtpu_lockfile": ""}) / "tmp/libtpu_lockfile"
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); getattr(fcntl, sys.argv[2])"
        "(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    )
    started = []

    def hold(kind: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(file), kind], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process.pid

    hold.file = file
    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
