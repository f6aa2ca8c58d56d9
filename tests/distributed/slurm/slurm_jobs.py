"""Jobs of a real Slurm, of a small study in a folder. Not a test."""

from collections.abc import Callable
from pathlib import Path

from chaos.launched import CODE
from chaos.slurm.cluster import SlurmCluster

Script = Callable[..., tuple[int, str]]
"""Function that runs lines of bash as a job, and returns its exit code and its output."""


def submit(slurm: SlurmCluster, home: Path, text: str, *options: str, **environ: str) -> int:
    """Submit a batch script, and return the number of its job."""
    (home / "job.sh").write_text(text)
    compiled = slurm.folder / "compiled"  # shared by all tests
    usual = {"JAX_COMPILATION_CACHE_DIR": f"{compiled}", "READ": "0.02 0.02", "COMPILE": "0"}
    environ = usual | {"PYTHONWARNINGS": "error"} | environ
    return slurm.submit(home / "job.sh", *options, cwd=home, environ=environ)


def output(home: Path, number: int) -> str:
    """Return what a job has written so far."""
    file = home / f"slurm-{number}.out"
    return file.read_text() if file.exists() else ""


def write_code(home: Path, before: str, after: str) -> None:
    """Change a place in the study's code."""
    assert CODE.count(before) == 1
    (home / "experiments" / "hurt.py").write_text(CODE.replace(before, after))
