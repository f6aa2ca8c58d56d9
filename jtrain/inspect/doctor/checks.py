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
from collections.abc import Mapping, Sequence
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


# The child sees the same modules as this process, also those beside the current directory.
_CODE = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(json.loads(sys.argv[3]), int(sys.argv[4]))"
)
_TAIL = 1 << 16  # bytes of the child's errors that are read
_GRACE = 2.0  # seconds; a process that waits for a file server cannot be killed


class ChildResult(NamedTuple):
    """What a child process reported, and how it ended."""

    reports: dict[str, Any]
    """Values by name; those reported before a crash too."""
    code: int | None
    """Exit code, negative for a signal; None if the timeout ended it."""
    errors: str
    """The end of its stdout and stderr."""
    seconds: float

    @property
    def ending(self) -> str:
        """The end in words: `was killed by SIGSEGV`."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        if self.code < 0:
            return f"was killed by {signal_name(-self.code)}"
        return f"ended with code {self.code}"


class Child:
    """A child process that runs `main(given, report)` of a module.

    It ends after `timeout` seconds at the latest.
    """

    def __init__(
        self,
        module: str,
        given: Mapping[str, Any],
        *,
        timeout: float,
        environ: Mapping[str, str] = os.environ,
    ):
        self._report, self._output = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._begun, self._timeout = time.monotonic(), timeout
        report = self._report.fileno()
        text = json.dumps({**given, "timeout": timeout})
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, json.dumps(sys.path), module, text, str(report)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=dict(environ),
            start_new_session=True,
            pass_fds=[report],
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_) -> None:
        self._kill()
        self._report.close()
        self._output.close()

    def wait(self) -> ChildResult:
        """Wait for the end, or end the process after its timeout; return its reports."""
        left = max(self._timeout - (time.monotonic() - self._begun), 0)
        try:
            code: int | None = self._process.wait(left)
        except subprocess.TimeoutExpired:
            code = None
            self._kill()
        reports: dict[str, Any] = {}
        for line in _read(self._report).splitlines():
            with contextlib.suppress(ValueError):  # a line that a kill cut
                reports.update(json.loads(line))
        errors = _read(self._output).decode("utf-8", "replace")
        return ChildResult(reports, code, errors, time.monotonic() - self._begun)

    def _kill(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)


class Reporter:
    """The child's side: appends a value at a time."""

    def __init__(self, file: int, timeout: float):
        """Take the open file; a child whose parent died ends by itself."""
        self._file = file
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout + 5)

    def __call__(self, **values: Any) -> None:
        """Append values; they outlive a crash."""
        os.write(self._file, json.dumps(values).encode() + b"\n")


def _read(file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _TAIL, max(size - _TAIL, 0))
