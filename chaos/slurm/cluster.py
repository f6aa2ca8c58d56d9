"""Slurm itself, with a controller and two nodes, in namespaces on this machine."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from chaos.slurm.packages import NoSlurmError, fetch

NODES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
CPUS = 8  # of each node, as Slurm counts them; the machine may have fewer
NAMESPACES = ("--mount", "--pid", "--net")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
PATIENCE = 240.0  # seconds for a job

# Without munge, whose daemon would need a user of its own. A requeued job waits for cred_expire and
# a second, by default two minutes: slurm.conf(5).
CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=6817
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
PluginDir={plugins}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=30
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=00:30:00 OverSubscribe=FORCE:8 State=UP
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, as `scontrol show job` describes it."""

    number: int
    fields: Mapping[str, str]

    @property
    def state(self) -> str:
        """Its state: `RUNNING`, `COMPLETED`, `FAILED` ..."""
        return self.fields["JobState"]

    @property
    def code(self) -> int:
        """The exit code of its script; 128 and the signal's number if a signal ended it."""
        code, _, number = self.fields["ExitCode"].partition(":")
        return int(code) or (128 + int(number) if int(number) else 0)

    @property
    def restarts(self) -> int:
        """The number of times it was requeued."""
        return int(self.fields["Restarts"])


class SlurmCluster:
    """A controller and two nodes, in namespaces of their own; `end` ends all that runs there."""

    def __init__(self, root: Path, folder: Path):
        self.folder, self._root = folder, root
        (plugins,) = root.glob("usr/lib/*/slurm-wlm")
        self._environ = {
            "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), str(root / "usr" / "bin"), os.environ["PATH"]]
            ),
        }
        (folder / "state").mkdir(parents=True)
        self._write_config(plugins)
        enter = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        nodes = [f"{name}={address}" for name, address in NODES.items()]
        init = [sys.executable, Path(__file__).with_name("nodes.py"), folder, root, *nodes]
        self._init = subprocess.Popen(
            [*enter, *init],
            env=self.environ({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(log := (folder / "init.log").open("w")),
            text=True,
        )
        log.close()
        try:
            self._await_nodes()
        except BaseException:
            self.end()
            raise

    def _write_config(self, plugins: Path) -> None:
        lines = []
        for number, (name, address) in enumerate(NODES.items()):
            (self.folder / f"spool-{name}").mkdir()
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={6818 + number} "
                f"CPUs={CPUS} RealMemory=1000 State=UNKNOWN"
            )
        text = CONFIG.format(
            folder=self.folder, plugins=plugins, nodes="\n".join(lines), names=",".join(NODES)
        )
        (self.folder / "slurm.conf").write_text(text)

    def _await_nodes(self) -> None:
        assert self._init.stdout is not None
        if not self._init.stdout.readline():
            raise NoSlurmError((self.folder / "init.log").read_text().strip() or "unshare failed")
        self._pid = int(self._children_of_unshare())
        deadline, shown = time.monotonic() + 60, ""
        while time.monotonic() < deadline:
            shown = self.command("sinfo", "--noheader", "--format=%n %T", check=False).stdout
            if shown.split() == [word for name in NODES for word in (name, "idle")]:
                return
            time.sleep(0.1)
        logs = "\n".join(f"{x.name}: {x.read_text()[-1500:]}" for x in self.folder.glob("*.log"))
        raise AssertionError(f"Slurm's nodes are not up after 60 s: {shown}\n{logs}")

    def _children_of_unshare(self) -> str:
        return Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()

    def environ(self, other: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a user of this cluster, with other variables."""
        plain = {
            name: value
            for name, value in os.environ.items()
            if name not in {"XLA_FLAGS", "NPROC"} and not name.startswith(("SLURM_", "PYTEST_"))
        }
        return {**plain, **self._environ, **other}

    def command(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        check: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command where the daemons are, and return it with its output."""
        done = subprocess.run(
            [*self.enter(cwd), *words],
            env=self.environ(environ or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def enter(self, cwd: Path | None = None) -> list[str]:
        """Return the words before a command that is to run where the daemons are."""
        where = f"--wdns={cwd or Path.cwd()}"
        return ["nsenter", "--target", f"{self._pid}", *NAMESPACES, where]

    def submit(self, script: Path, *options: str, cwd: Path, environ: Mapping[str, str]) -> int:
        """Submit a batch script, and return the number of its job."""
        words = ("sbatch", "--parsable", *options, script)
        return int(self.command(*words, cwd=cwd, environ=environ).stdout.split(";")[0])

    def job(self, number: int) -> Job:
        """Return what Slurm knows of a job."""
        shown = self.command("scontrol", "--oneliner", "show", "job", f"{number}").stdout
        return Job(number, dict(x.split("=", 1) for x in shown.split() if "=" in x))

    def wait(self, number: int, seconds: float = PATIENCE) -> Job:
        """Wait until a job has ended, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if job.state in ENDED:
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.1)

    def tasks(self, words: str, number: int) -> dict[int, int]:
        """Return the process of each task of a job's step, whose command line has `words`."""
        found = {}
        for pid in _descendants(self._init.pid):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                environ = dict(x.split("=", 1) for x in pairs if "=" in x)
                task = environ.get("SLURM_JOB_ID") == f"{number}" and "SLURM_STEP_ID" in environ
                if task and words in line and "srun" not in line:
                    found[int(environ["SLURM_PROCID"])] = pid
        return found

    def end(self) -> None:
        """End the daemons and all that they started."""
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.close()
        try:
            self._init.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._init.send_signal(signal.SIGKILL)
            self._init.wait()
        self._init.stdout.close()


@contextlib.contextmanager
def running_cluster(cache: Path, folder: Path) -> Iterator[SlurmCluster]:
    """Bring up Slurm, and take it down.

    Raises:
        NoSlurmError: if this machine cannot run it.
    """
    if os.geteuid():  # in a user namespace its daemons fail: "Failed to drop supplementary groups"
        raise NoSlurmError("its daemons need root, and this process is not root's")
    for name in ("unshare", "nsenter", "mount"):
        if shutil.which(name) is None:
            raise NoSlurmError(f"{name} (of util-linux) is not here")
    cluster = SlurmCluster(fetch(cache), folder)
    try:
        yield cluster
    finally:
        cluster.end()


def _descendants(pid: int) -> set[int]:
    """Return the processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since it was listed
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, ahead = set(), [pid]
    while ahead:
        more = children.get(ahead.pop(), [])
        found.update(more)
        ahead += more
    return found
