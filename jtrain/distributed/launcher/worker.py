"""Worker process: one of several processes of a command."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jtrain.distributed.heartbeat import STACKS, Beat, Channel, read_beat
from jtrain.io.formatting import signal_name

TAIL = 400  # lines of its last output that are kept
SLICE = 0.05  # seconds of one of many short waits: a machine that stalls uses up one of them
# A wrapper that makes Linux kill the command when its launcher is gone, killed for example, by
# prctl(PR_SET_PDEATHSIG, SIGKILL). It is a process of its own, since JAX warns about code that runs
# after a fork.
_TIE = """
import ctypes, os, sys
tie = getattr(ctypes.CDLL(None), "prctl", None)
if tie: tie(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_TIED = (sys.executable, "-I", "-S", "-c", _TIE)


class WorkerProcess:
    """A process on this machine, in a `with` block; its children end with it.

    The output of process 0 goes to the output of this process. The output of the others is kept in
    case they fail.
    """

    def __init__(self, index: int, command: Sequence[str], environ: Mapping[str, str]):
        self.index, self.ended = index, 0.0  # time of its end, by the monotonic clock; 0: it runs
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        """The last lines of its output; of process 0, whose output is shown, perhaps none."""
        shown = index == 0
        self._channel = Channel()
        self._process = subprocess.Popen(
            [*_TIED, *command],
            env={**environ, **self._channel.environ},
            pass_fds=self._channel.files,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.PIPE if shown else subprocess.STDOUT,  # in the order of the output
            start_new_session=True,  # Ctrl-C reaches it once, through the launcher
        )
        pipe = self._process.stderr if shown else self._process.stdout
        echo = sys.stderr if shown else None
        self._reader = threading.Thread(target=self._read, args=(pipe, echo), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)  # records the end
        self._reader.start()
        self._waiter.start()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.__exit__()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, the negative number of a signal; None while it runs."""
        return self._process.returncode if self.ended else None

    @property
    def stopped(self) -> bool:
        """True if a signal such as SIGSTOP has stopped it; always False without /proc."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def beat(self) -> Beat:
        """Return its last beat; number 0 without a heartbeat."""
        return read_beat(self._channel.files.pulse)

    def stacks(self) -> bytes:
        """Return the stacks that it has written; empty before."""
        return self._channel.stacks()

    def signal(self, number: int) -> None:
        """Forward a signal, if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def dump(self) -> None:
        """Make it write the stacks of its threads; a stopped process is resumed for this."""
        self.signal(STACKS)
        self.signal(signal.SIGCONT)

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 plus the number of a signal."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def exit_reason(self) -> str:
        """Reason of its end: `exit code 70`, `SIGKILL`."""
        code = self.code or 0
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    @property
    def hidden_output(self) -> str:
        """Its last output; empty for process 0, whose output was shown at once."""
        return "" if self.index == 0 else "".join(self.tail)

    def kill(self) -> None:
        """Kill it with all its children; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._waiter.join()
        self.drain(1.0)

    def drain(self, seconds: float) -> None:
        """Wait for the last output of a process that ended; a child may still have the pipe."""
        for _ in range(round(seconds / SLICE)):
            self._reader.join(timeout=SLICE)

    def _wait(self) -> None:
        self._process.wait()
        self.ended = time.monotonic()

    def _read(self, pipe: IO[bytes], echo: IO[str] | None) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                self.tail.append(text)
                if echo is not None:
                    with contextlib.suppress(OSError, ValueError):  # the output is closed
                        echo.write(text)
                        echo.flush()
