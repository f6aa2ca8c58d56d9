"""Tasks in processes of their own, half a second each: forked from a server that imported JAX.

`python -m chaos.forked` is the server. It starts no device, so that each child starts its own. It
reads a task per line, and answers with the child's process number and its exit code.
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
    """A running task."""

    def __init__(self, number: int, server: "Server"):
        self.number, self._server = number, server

    def ended(self) -> int | None:
        """Return the exit code if the task ended; negative for a signal, as in subprocess."""
        return self._server.code()

    def wait(self, seconds: float) -> int | None:
        """Wait at most `seconds`; return the exit code, None if the task still runs."""
        end = time.monotonic() + seconds
        while (code := self.ended()) is None and time.monotonic() < end:
            time.sleep(0.002)
        return code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.ended() is None:
            os.kill(self.number, number)

    def kill(self) -> int:
        """Kill it by SIGKILL if it still runs; return its exit code."""
        self.signal(signal.SIGKILL)
        code = self.wait(60.0)
        assert code is not None, "a process outlived SIGKILL"
        return code


@functools.cache
def server(folder: Path) -> "Server":
    """Return the server of a folder; it runs until this process ends."""
    started = Server(folder)
    atexit.register(started.__exit__)
    return started


class Server:
    """Server process that forks tasks, with the shim preloaded; use it in a `with` block."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None):
        """Start the server; all servers of a folder share its compilation cache."""
        # Tests set flags for eight devices; a task needs one.
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
        self._received = b""
        assert self._answer(_READY) == {"ready": True}

    def start(self, task: str, folder: Path, **arguments: Any) -> Process:
        """Start a task of `chaos.tasks` in `folder`; one at a time.

        Its output goes to `folder`/said.txt.
        """
        assert not self._running, "one at a time"
        request = {"task": task, "folder": str(folder), "arguments": arguments}
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps(request).encode() + b"\n")
        pipe.flush()
        number = self._answer(60.0)["pid"]
        self._running, self._code = True, None
        return Process(number, self)

    def run(self, task: str, folder: Path, *, patience: float = 120.0, **arguments: Any) -> Any:
        """Run a task and return its result.

        Raises:
            AssertionError: if its exit code is not 0, with its output.
        """
        process = self.start(task, folder, **arguments)
        code = process.wait(patience)
        if code is None:
            process.kill()
        assert code == 0, f"{task} ended with {code}: {said(folder)[-2000:]}"
        return json.loads((folder / "gave.json").read_text())

    def code(self) -> int | None:
        """Return the exit code of the task, None while it runs."""
        if self._running and (b"\n" in self._received or self._readable(0.0)):
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
        while b"\n" not in self._received:
            assert self._readable(seconds), f"no answer in {seconds:.0f} s"
            more = os.read(_pipe(self._process.stdout).fileno(), 4096)
            assert more, "the server has ended"
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([_pipe(self._process.stdout)], [], [], seconds)[0])


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "the pipe was requested"
    return end


def said(folder: Path) -> str:
    """Return the output of the last task in a folder."""
    path = folder / "said.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> None:
    """Serve tasks until stdin ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background process
    warnings.simplefilter("ignore")  # Python and JAX advise against forking after threads began
    tasks = importlib.import_module(TASKS)
    tasks.warm()
    _send({"ready": True})
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115  children do not read it
        request = json.loads(line)
        if (child := os.fork()) == 0:
            _prepare_child(Path(request["folder"]))
            result = getattr(tasks, request["task"])(**request["arguments"])
            Path("gave.json").write_text(json.dumps(result))
            return
        _send({"pid": child})
        with _ignore_interrupts():
            _, status = os.waitpid(child, 0)
        _send({"code": os.waitstatus_to_exitcode(status)})


def _prepare_child(folder: Path) -> None:
    """Give a child its own directory and streams."""
    os.chdir(folder)
    (folder / "gave.json").unlink(missing_ok=True)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore SIGINT: a Ctrl-C at the terminal is for the client, not for the server."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _send(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(dict(message)).encode() + b"\n")


if __name__ == "__main__":
    main()
