"""Signs of a job of several processes around a process that no launcher numbered.

A scheduler gave several machines or tasks, and this process was started without its launcher: it
would train by itself, and so would each of its like.
"""

from collections.abc import Mapping
from pathlib import Path

from jtrain.distributed.cluster.cluster import PORT
from jtrain.errors import ConfigError
from jtrain.io.regular_files import read_bytes

_BY_HAND = f"JTRAIN_COORDINATOR=HOST:{PORT}, JTRAIN_PROCESSES and JTRAIN_PROCESS"


def find_sign(environ: Mapping[str, str]) -> str:
    """Return a warning about a job of several processes; empty without one.

    Raises:
        ConfigError: if this process is certainly one of several.
    """
    if number := _pbsdsh_number(environ):
        raise ConfigError(
            f"pbsdsh started this process on another node of the PBS job ({number}), and does not "
            f"say how many there are. Start them by mpiexec, or set {_BY_HAND} for each; or set "
            f"JTRAIN_PROCESSES=1 if each trains by itself."
        )
    return _slurm(environ) or _pbs(environ) or _lsf(environ) or _mpi_job(environ)


def _slurm(environ: Mapping[str, str]) -> str:
    tasks, nodes = environ.get("SLURM_NTASKS", ""), environ.get("SLURM_JOB_NUM_NODES", "")
    several = next((f"{n} {of}" for n, of in ((tasks, "tasks"), (nodes, "nodes")) if _many(n)), "")
    if "SLURM_JOB_ID" not in environ or not several:
        return ""
    return (
        f"a Slurm job of {several}, and srun did not start this process, so that it trains by "
        f"itself: type srun before it"
    )


def _pbsdsh_number(environ: Mapping[str, str]) -> str:
    """Return the number of a process that pbsdsh started beyond the first node; empty if none.

    Source: https://linux.die.net/man/1/pbsdsh.
    """
    names = ("PBS_NODENUM", "PBS_VNODENUM")
    later = (name for name in names if environ.get(name, "").isdigit() and int(environ[name]))
    return next((f"{name}={environ[name]}" for name in later), "")


def _pbs(environ: Mapping[str, str]) -> str:
    try:
        hosts = set(read_bytes(Path(environ.get("PBS_NODEFILE") or "/none"), most=1 << 26).split())
    except (OSError, ValueError):
        return ""
    return _alone("PBS", len(hosts), "mpiexec") if len(hosts) > 1 else ""


def _lsf(environ: Mapping[str, str]) -> str:
    hosts = set(environ.get("LSB_MCPU_HOSTS", "").split()[::2])
    return _alone("LSF", len(hosts), "jsrun or mpirun") if len(hosts) > 1 else ""


def _mpi_job(environ: Mapping[str, str]) -> str:
    if environ.get("K_MPI_JOB_ROLE") != "launcher":
        return ""
    return (
        "this is the launcher of a Kubeflow MPIJob, and mpirun did not start this process, so that "
        "it trains by itself: type mpirun before it"
    )


def _alone(scheduler: str, hosts: int, launcher: str) -> str:
    return (
        f"a job of {scheduler} on {hosts} hosts, and this process trains by itself on one of them: "
        f"start it by {launcher}, or set {_BY_HAND} for each"
    )


def _many(number: str) -> bool:
    return number.isdigit() and int(number) > 1
