"""One of several processes of a command."""

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

from jtrain.distributed.heartbeat import Beat, heartbeat, read_beat
from jtrain.distributed.heartbeat.channel import STACKS, Channel

KEPT = 400  # lines of what it said last
# Runs what follows so that Linux kills it when who started it is gone, killed say: by
# prctl(PR_SET_PDEATHSIG, SIGKILL). In a process before it, for JAX warns of functions after a fork.
_TIE = """
import ctypes, os, sys
tie = getattr(ctypes.CDLL(None), "prctl", None)
if tie: tie(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_TIED = (sys.executable, "-I", "-S", "-c", _TIE)


class WorkerProcess:
    """A process that has begun; in a `with` block, after which neither it nor its children are.

    The words of process 0 go where those of this process go. What the others say is kept, for the
    case that they fail.
    """

    def __init__(self, index: int, command: Sequence[str], environ: Mapping[str, str]):
        self.index, self.ended = index, 0.0  # when, by the monotonic clock; 0: it runs
        self._tail: collections.deque[str] = collections.deque(maxlen=KEPT)
        shown = index == 0
        self._channel = Channel()
        self._process = subprocess.Popen(
            [*_TIED, *command],
            env={**environ, **self._channel.environ},
            pass_fds=self._channel.files,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.PIPE if shown else subprocess.STDOUT,  # in the order it was said
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        pipe, echo = self._process.stdout, None
        if shown:
            pipe, echo = self._process.stderr, sys.stderr
        self._reader = threading.Thread(target=self._read, args=(pipe, echo), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)  # knows when it ended
        self._reader.start()
        self._waiter.start()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._channel.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended, a signal's number below zero; None while it runs."""
        return self._process.returncode if self.ended else None

    @property
    def exit_code(self) -> int:
        """The same as a shell says it: 128 and the number of the signal."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, SIGSTOP say; never where there is no /proc."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def beat(self) -> Beat:
        """Return the last beat of its pulse; number 0 if it has none."""
        return read_beat(self._channel.files.pulse)

    def dump(self) -> None:
        """Have it write the stacks of its threads; one that is stopped does so when it goes on."""
        self.signal(STACKS)
        self.signal(signal.SIGCONT)

    def stacks(self) -> bytes:
        """Return the stacks that it has written; nothing before."""
        return self._channel.stacks()

    def rehearsed(self, place: int) -> float:
        """Return when the fault at that place of a rehearsal came; 0 before it has."""
        return heartbeat.rehearsal_time(self._channel.files.pulse, place)

    def note_rehearsed(self, place: int) -> None:
        """Tell it that the fault at that place of a rehearsal has come."""
        heartbeat.note_rehearsed(self._channel.files.pulse, place)

    def signal(self, number: int) -> None:
        """Hands a signal on, if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Ends it at once, with all that it started; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._waiter.join()
        self._reader.join(timeout=1.0)

    @property
    def how(self) -> str:
        """It ended: `exit code 70`, `SIGKILL`."""
        code = self.code or 0
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    @property
    def unshown(self) -> str:
        """What it said last; nothing of process 0, whose words were shown as they came."""
        return "" if self.index == 0 else "".join(self._tail)

    def last_words(self) -> str:
        """What it said before it failed, and how."""
        return f"{self.unshown}process {self.index} failed ({self.how}), and all were ended\n"

    def _wait(self) -> None:
        self._process.wait()
        self.ended = time.monotonic()

    def _read(self, pipe: IO[bytes], echo: IO[str] | None) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                self._tail.append(text)
                if echo is not None:
                    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                        echo.write(text)
                        echo.flush()
