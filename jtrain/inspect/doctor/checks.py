"""Findings of the checks, and the child processes of checks that may crash or hang."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

from jtrain.io.formatting import signal_name

Status = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check of one thing."""

    check: str
    """The check: packages, devices and so on."""
    name: str
    """Short name of the fault or of the healthy thing: jaxlib-version, disk-full."""
    status: Status
    """error: training cannot start or would lose results; warning: it works, but worse."""
    found: str
    """A sentence: what was found."""
    remedy: str = ""
    """The line to type; empty for ok."""


def ok(check: str, found: str) -> Finding:
    """Return a finding of a healthy thing."""
    return Finding(check, "ok", "ok", found)


def warning(check: str, name: str, found: str, remedy: str) -> Finding:
    """Return a finding of something that works, but worse than it could."""
    return Finding(check, name, "warning", found, remedy)


def error(check: str, name: str, found: str, remedy: str) -> Finding:
    """Return a finding of something that must be fixed before training."""
    return Finding(check, name, "error", found, remedy)


def format_findings(findings: Sequence[Finding]) -> str:
    """Format findings: a line each, and below it the line to type."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:7}  {finding.check:{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':7}  {'':{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def count_status(findings: Sequence[Finding], status: Status) -> int:
    """Return the number of findings with a status."""
    return sum(finding.status == status for finding in findings)


# The child sees the same modules as this process, also those beside the current directory. It ends
# by itself after its time: its parent may have died.
_CODE = (
    "import sys, json, importlib, signal; sys.path[:], module, given, seconds = "
    "map(json.loads, sys.argv[1:]); signal.setitimer(signal.ITIMER_REAL, seconds); "
    "importlib.import_module(module).main(given)"
)
_TAIL = 1 << 16  # bytes of the child's output that are read
_GRACE = 2.0  # seconds; a process that waits for a file server cannot be killed


class ChildResult(NamedTuple):
    """What a child process reported, and how it ended."""

    reports: dict[str, Any]
    """Values by name; those reported before a crash too."""
    code: int | None
    """Exit code, negative for a signal; None if the timeout ended it."""
    errors: str
    """The end of its stderr."""
    seconds: float

    @property
    def ending(self) -> str:
        """The end in words: `was killed by SIGSEGV`."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        if self.code < 0:
            return f"was killed by {signal_name(-self.code)}"
        return f"ended with code {self.code}"


@contextlib.contextmanager
def start_child(
    module: str,
    given: Mapping[str, Any],
    *,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Callable[[], ChildResult]]:
    """Run `main(given)` of a module in a child process; yield a function that waits for its end.

    The process ends after `timeout` seconds at the latest, or with the block.
    """
    begun = time.monotonic()
    arguments = map(json.dumps, (sys.path, module, given, timeout + 5))
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environ),
            start_new_session=True,
        )

        def wait() -> ChildResult:
            left, code = max(timeout - (time.monotonic() - begun), 0), None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(left)
            reports: dict[str, Any] = {}
            for line in _read(output).splitlines():
                with contextlib.suppress(ValueError):  # of another library, or cut by a kill
                    reports |= json.loads(line) if line.startswith("{") else {}
            return ChildResult(reports, code, _read(errors), time.monotonic() - begun)

        try:
            yield wait
        finally:  # with the processes that it started
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)


def report(**values: Any) -> None:
    """Report values from a child; they outlive a crash."""
    print(f"\n{json.dumps(values)}", flush=True)  # noqa: T201


def _read(file: BinaryIO) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _TAIL, max(size - _TAIL, 0)).decode("utf-8", "replace")
