"""Tasks in processes of their own, half a second each: forked from one that has imported JAX.

`python -m chaos.forked` is that one: no device is started in it, so that each child
starts its own. It reads a task a line, and answers with the child's number and its exit code.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from chaos import shim

TASKS = "chaos.tasks"
_READY = 120.0  # seconds that the imports may take on a busy machine


class Process:
    """A task that runs."""

    def __init__(self, number: int, server: "Server"):
        self.number, self._server = number, server

    def ended(self) -> int | None:
        """Its exit code if it has ended; that of a signal is negative, as subprocess has it."""
        return self._server.code()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, None if it has none yet after so many seconds."""
        end = time.monotonic() + seconds
        while (code := self.ended()) is None and time.monotonic() < end:
            time.sleep(0.002)
        return code

    def signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.ended() is None:
            os.kill(self.number, number)

    def kill(self) -> int:
        """Ends it by SIGKILL if it still runs; its exit code."""
        self.signal(signal.SIGKILL)
        code = self.wait(60.0)
        assert code is not None, "a process outlived SIGKILL"
        return code


@functools.cache
def server(folder: Path) -> "Server":
    """One for all that have the same folder, until this process ends."""
    started = Server(folder)
    atexit.register(started.__exit__)
    return started


class Server:
    """The process that is forked, with the shim in it; use it in a `with` block."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None):
        """What is compiled lies in `folder`, for all servers that have the same."""
        # Tests set flags for eight devices; of a task's process one is enough.
        self.environ = {
            **(os.environ if environ is None else environ),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=1",
            "LD_PRELOAD": str(shim.build(folder)),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environ,
        )
        self._code: int | None = None
        self._running = False
        self._heard = b""
        assert self._answer(_READY) == {"ready": True}

    def start(self, task: str, folder: Path, **arguments: Any) -> Process:
        """Begins a task of `chaos.tasks` in `folder`; one at a time.

        What it says goes to `folder`/said.txt.
        """
        assert not self._running, "one at a time"
        asked = {"task": task, "folder": str(folder), "arguments": arguments}
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps(asked).encode() + b"\n")
        pipe.flush()
        number = self._answer(60.0)["pid"]
        self._running, self._code = True, None
        return Process(number, self)

    def run(self, task: str, folder: Path, *, patience: float = 120.0, **arguments: Any) -> Any:
        """What a task gives back.

        Raises:
            AssertionError: if it ends with another code than 0, with what it said.
        """
        process = self.start(task, folder, **arguments)
        code = process.wait(patience)
        if code is None:
            process.kill()
        assert code == 0, f"{task} ended with {code}: {said(folder)[-2000:]}"
        return json.loads((folder / "gave.json").read_text())

    def code(self) -> int | None:
        """The exit code of the task, None while it runs."""
        if self._running and (b"\n" in self._heard or self._speaks(0.0)):
            self._code, self._running = self._answer(60.0)["code"], False
        return self._code

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._heard:
            assert self._speaks(seconds), f"no answer in {seconds:.0f} s"
            more = os.read(_pipe(self._process.stdout).fileno(), 4096)
            assert more, "the server has ended"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _speaks(self, seconds: float) -> bool:
        return bool(select.select([_pipe(self._process.stdout)], [], [], seconds)[0])


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "it was asked for"
    return end


def said(folder: Path) -> str:
    """What the last task in a folder wrote to its output."""
    path = folder / "said.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> None:
    """Serves until its input ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if begun in the background
    warnings.simplefilter("ignore")  # Python and JAX advise against forking after threads began
    tasks = importlib.import_module(TASKS)
    tasks.warm()
    _say({"ready": True})
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115  a child reads no more
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            _become(Path(asked["folder"]))
            given = getattr(tasks, asked["task"])(**asked["arguments"])
            Path("gave.json").write_text(json.dumps(given))
            return
        _say({"pid": child})
        with _deaf():
            _, status = os.waitpid(child, 0)
        _say({"code": os.waitstatus_to_exitcode(status)})


def _become(folder: Path) -> None:
    """Makes of a child a process by itself."""
    os.chdir(folder)
    (folder / "gave.json").unlink(missing_ok=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A Ctrl-C at the terminal is for who asked, not for the server."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(words: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(dict(words)).encode() + b"\n")


if __name__ == "__main__":
    main()
