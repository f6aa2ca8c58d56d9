"""Findings: what a check saw, and the line to type."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

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
