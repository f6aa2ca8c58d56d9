"""A cloud in a folder: programs named gcloud, ssh, scp, sudo and uv that record each call.

Commands for a host are run by bash in a home folder of its own; `PROGRAM` stands in for jtrain.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ends with the next of the codes in `codes`; 255 takes the slice away, as a preemption does.
PROGRAM = """#!/bin/bash
echo "$*" >> "$CLOUD/started"
mkdir -p runs/gpt2 && echo one >> runs/gpt2/metrics.jsonl
code=$(head -n 1 "$CLOUD/codes"); sed -i 1d "$CLOUD/codes"
[ "$code" = 255 ] && echo SUSPENDED > "$CLOUD/state"
exit "${code:-0}"
"""

# A host on which nothing is mounted yet, and whose driver has CUDA 13. `sleep` is the real one: the
# scripts give a run the seconds that it needs to save before they kill it.
QUIET = {"mountpoint": "exit 1", "nvidia-smi": "echo 580.65.06"}


class Cloud:
    """Folder of a cloud, and what was called."""

    def __init__(self, folder: Path, *codes: int, hosts: int = 1, program: str = PROGRAM):
        self.folder = folder / "cloud"
        self.project = folder / "project"
        for made in (self.folder / "bin", self.folder / "nfs", self.project / "configs"):
            made.mkdir(parents=True)
        (self.project / "configs" / "gpt2.yaml").write_text("experiment: language\n")
        (self.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        (self.folder / "hosts").write_text(str(hosts))
        self._write("jtrain", program)
        for name, text in QUIET.items():
            self._write(name, f"#!/bin/sh\n{text}\n")
        for name in ("gcloud", "ssh", "scp", "sudo", "uv"):
            self._write(name, f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {name} "$@"\n')

    def _write(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def run(self, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script of scripts/ in the project's folder."""
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / script), *words],
            env=self.environ | env,
            cwd=self.project,
            capture_output=True,
            text=True,
            timeout=500,  # a machine with other work
            check=False,
        )

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which the cloud's programs are found first."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "CLOUD": str(self.folder)}

    @property
    def calls(self) -> list[list[str]]:
        """The calls of gcloud, ssh and scp, in order."""
        calls = self.folder / "calls"
        return (
            [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        )

    @property
    def started(self) -> list[str]:
        """What jtrain was started with, in order."""
        return (self.folder / "started").read_text().splitlines()

    def names(self) -> list[str]:
        """Return each call by its verb: create, describe, ssh, scp, delete."""
        verbs = {"create", "describe", "delete", "ssh", "scp"}
        return [next(word for word in call if word in verbs) for call in self.calls]


def main(name: str, *words: str) -> int:
    """Do what the program `name` does, in the folder CLOUD."""
    cloud = Path(os.environ["CLOUD"])
    if name in {"gcloud", "ssh", "scp"}:
        with (cloud / "calls").open("a") as calls:
            calls.write(json.dumps([name, *words]) + "\n")
    programs = {"gcloud": _gcloud, "ssh": _ssh, "scp": _scp, "sudo": _sudo, "uv": _uv}
    return programs[name](cloud, *words)


def _gcloud(cloud: Path, *words: str) -> int:
    _, _, group, verb, *rest = words
    state = cloud / "state"
    if verb == "create":
        state.write_text("WAITING_FOR_RESOURCES")
        return 0
    if verb == "delete":
        state.unlink()
        for home in cloud.glob("host-*"):
            shutil.rmtree(home)
        return 0
    if not state.exists():
        print("NOT_FOUND", file=sys.stderr)
        return 1
    if verb == "describe":
        found = state.read_text().strip()
        if found == "WAITING_FOR_RESOURCES":
            state.write_text("ACTIVE")
        print("READY" if group == "tpu-vm" else found)
        return 0
    workers = range(int((cloud / "hosts").read_text()))
    chosen = [0] if "--worker=0" in rest else workers
    if verb == "scp":
        for worker in chosen:
            _copy(cloud, rest[0], rest[1], worker)
        return 0
    (command,) = (word.partition("=")[2] for word in rest if word.startswith("--command="))
    codes = [_on_host(cloud, worker, command) for worker in chosen]
    return next(filter(None, codes), 0)  # as gcloud 528 does it: of the first worker that failed


def _ssh(cloud: Path, *words: str) -> int:
    return _on_host(cloud, 0, words[-1])


def _scp(cloud: Path, *words: str) -> int:
    _copy(cloud, words[-2], words[-1], 0)
    return 0


def _home(cloud: Path, worker: int) -> Path:
    home = cloud / f"host-{worker}"
    home.mkdir(exist_ok=True)
    return home


def _copy(cloud: Path, source: str, to: str, worker: int) -> None:
    places = [
        _home(cloud, worker) / name.partition(":")[2] if ":" in name else Path(name)
        for name in (source, to)
    ]
    shutil.copy(*places)


def _on_host(cloud: Path, worker: int, command: str) -> int:
    home = _home(cloud, worker)
    env = os.environ | {"HOME": str(home)}
    return subprocess.run(["bash", "-c", command], cwd=home, env=env, check=False).returncode


def _sudo(cloud: Path, *words: str) -> int:
    if words[0] == "mount":  # an empty folder becomes the one that all hosts share
        Path(words[-1]).rmdir()
        Path(words[-1]).symlink_to(cloud / "nfs")
    return 0


def _uv(cloud: Path, *words: str) -> int:
    with (cloud / "installed").open("a") as installed:
        installed.write(" ".join(words) + "\n")
    program = Path.home() / "jtrain-env" / "bin" / "jtrain"
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(cloud / "bin" / "jtrain", program)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
