"""Results of all trials, one line each: a stopped run resumes, and runs add up."""

import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import Any

from chaos.trial import Trial

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True)
class Result:
    """A trial, its date, and the versions."""

    trial: Trial
    date: str
    versions: str


class Results:
    """The results in a file."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.all = [_result(json.loads(line)) for line in _complete_lines(path)]

    def append(self, trial: Trial) -> None:
        """Append a trial durably."""
        result = Result(trial, time.strftime("%Y-%m-%d"), versions())
        line = json.dumps(dataclasses.asdict(result)) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
        self.all.append(result)

    def of(self, name: str) -> dict[int, list[Result]]:
        """Return the results of a row by seed, the latest last."""
        found: dict[int, list[Result]] = {}
        for result in self.all:
            if result.trial.name == name:
                found.setdefault(result.trial.seed, []).append(result)
        return found


def versions() -> str:
    """Return the versions in use: `jtrain 0.1, Python 3.11.7, jax 0.10.2, ...`."""
    packages = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return ", ".join(
        [f"jtrain {version('jtrain')}", f"Python {platform.python_version()}", *packages]
    )


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `1-100, 205`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _complete_lines(path: Path) -> Sequence[bytes]:
    if not path.exists():
        return []
    found = path.read_bytes()
    end = found.rfind(b"\n") + 1
    if end < len(found):  # a kill tore the last line
        os.truncate(path, end)
    return found[:end].splitlines()


def _result(line: dict[str, Any]) -> Result:
    return Result(Trial(**line["trial"]), line["date"], line["versions"])
