"""`python -m chaos.slurm FOLDER`: download Slurm's packages to a folder, and start Slurm once."""

import sys
import tempfile
from pathlib import Path

from chaos.slurm.cluster import running_cluster
from chaos.slurm.packages import NoSlurmError


def main(folder: Path) -> int:
    """Print Slurm's version, or the reason why it cannot run here; return the exit code."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="slurm-") as scratch,
            running_cluster(folder, Path(scratch) / "cluster") as cluster,
        ):
            sys.stdout.write(cluster.command("sinfo", "--version").stdout)
    except NoSlurmError as error:
        sys.stdout.write(f"no Slurm on this machine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
