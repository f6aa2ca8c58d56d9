"""The table of a run of all parts, with the versions that it is of."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch")


def environment(rehearsal: bool) -> dict[str, str]:
    """Return the date, the machine and the versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "date": date,
        "kind": "rehearsal on a CPU: its numbers mean nothing" if rehearsal else "measurement",
        "gpu": "none" if rehearsal else _gpu(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **versions,
    }


def _gpu() -> str:
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not installed"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def markdown(found: dict[str, Any]) -> str:
    """Return the page of all parts."""
    facts = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
    lines = ["# jtrain on one GPU", "", facts, ""]
    for name, part in found["parts"].items():
        lines += [f"## {name}: {part['title']}", ""]
        if "failed" in part:
            lines += ["FAILED:", "", "```", part["failed"], "```", ""]
            continue
        lines += [f"**{note}**\n" for note in part.get("notes", [])]
        lines += ["| what | value | unit |", "|---|---:|---|"]
        lines += [
            f"| {row['what']} | {_number(row['value'])} | {row['unit']} |" for row in part["rows"]
        ]
        lines += [""]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
