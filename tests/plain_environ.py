"""Programs that tests start as a person would."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# How a program is run whose words are read.
SAID: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}


def plain_environ() -> dict[str, str]:
    """Return the variables without the flags of conftest.py: one CPU device, and quick programs."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def run_python(
    *words: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words to its end, which has to be a good one."""
    command, env = [sys.executable, *map(str, words)], plain_environ() if env is None else env
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def until(
    condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 400
) -> None:
    """Wait until a condition holds, and expect a process to run meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the process has ended"
        assert time.monotonic() < end, "it did not come to this"
        time.sleep(0.01)


def run_and_kill(when: Callable[[], object], *words: str, **variables: str) -> None:
    """Type `jtrain run WORDS`, and kill it by SIGKILL as soon as a condition holds."""
    run = subprocess.Popen(
        [sys.executable, "-m", "jtrain", "run", *words],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until(when, run)
    finally:
        run.kill()
    told = run.communicate(timeout=300)[1].decode()
    assert run.returncode == -9, told
