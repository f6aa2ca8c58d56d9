"""Audit of Python code: recorded side effects, by Python's own audit hook."""

# ruff: noqa: E501  (a list reads best on a line)

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    name: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}{tuple(str(a)[:80] for a in self.args)}"


# Events that reading a config, a checkpoint or a run must never cause.
NEVER = (
    "subprocess.", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile",
    "os.putenv", "os.kill", "pty.spawn", "socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
    "pickle.find_class", "exec", "compile", "code.", "ctypes.dlopen", "shutil.", "tempfile.", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watching = threading.local()
_everywhere: list[list["Event"]] = []
_installed: list[bool] = []


def _hook(name: str, args: tuple[Any, ...]) -> None:
    seen = getattr(_watching, "seen", None)
    for events in (seen, *_everywhere):
        if events is not None:
            events.append(Event(name, args))


@contextlib.contextmanager
def watched(*, everywhere: bool = False) -> Iterator[list[Event]]:
    """Record the events inside, in order: of this thread, or of all threads."""
    if not _installed:
        sys.addaudithook(_hook)
        _installed.append(True)
    seen: list[Event] = []
    around = getattr(_watching, "seen", None)
    if everywhere:
        _everywhere.append(seen)
    else:
        _watching.seen = seen
    try:
        yield seen
    finally:
        _watching.seen = around
        _everywhere[:] = [events for events in _everywhere if events is not seen]


def unwanted(events: list[Event], *within: Path) -> list[str]:
    """Return the events that reading data must not cause.

    These are running code, importing a module, writing a file, or reading one outside of `within`.
    """
    found = []
    for event in events:
        name = event.name
        if event.args and "__pycache__" in str(event.args[0]):  # Python keeps a module's bytecode
            continue
        is_unwanted = name == "import" or any(
            name == n or (n[-1] == "." and name.startswith(n)) for n in NEVER
        )
        if name == "socket.__new__":  # asyncio wakes itself through a socket pair
            is_unwanted = event.args[1] != socket.AF_UNIX
        if name == "open" and isinstance(event.args[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(event.args[0])).absolute()
            flags = event.args[2] if isinstance(event.args[2], int) else 0
            inside = any(path.resolve().is_relative_to(w.resolve()) for w in within)
            is_unwanted = bool(flags & _WRITES) or not inside
        if is_unwanted:
            found.append(str(event))
    return found
