"""Packages of Slurm, downloaded by apt and unpacked into a folder: nothing is installed."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libmunge2",
    "libhwloc15",
)
PACKAGES_FOLDER = "JTRAIN_SLURM_PACKAGES"  # variable that names the folder of the tests


class NoSlurmError(Exception):
    """This machine cannot run Slurm's daemons: the reason."""


def fetch(cache: Path) -> Path:
    """Return the folder with Slurm's unpacked packages, which are downloaded once.

    Raises:
        NoSlurmError: if apt or its packages are not to be had here.
    """
    root = cache / "root"
    if root.exists():
        return root
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        raise NoSlurmError(f"{missing[0]} is not here, and Slurm comes from Debian's packages")
    partial = cache / f"partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "root").mkdir(parents=True)
    if _apt(partial, "download", *PACKAGES):  # the machine's lists may be old or empty
        own = _own_lists(partial)
        if error := _apt(partial, *own, "update") or _apt(partial, *own, "download", *PACKAGES):
            raise NoSlurmError(
                f"apt-get download {' '.join(PACKAGES)} failed: {error.splitlines()[-1]}"
            )
    for package in sorted(partial.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, partial / "root"], check=True)
    with contextlib.suppress(OSError):  # another worker was first
        (partial / "root").rename(root)
    shutil.rmtree(partial, ignore_errors=True)
    return root


def _own_lists(folder: Path) -> list[str]:
    """Return options by which apt keeps its lists in a folder: the machine's stay as they are."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    return ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]


def _apt(folder: Path, *words: str) -> str:
    """Run apt-get in a folder, and return its complaints; empty if it went well."""
    command = ["apt-get", "-o", "APT::Sandbox::User=root", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.stderr or "no reason" if done.returncode else ""
