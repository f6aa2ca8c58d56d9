"""Announcement of a running run in its directory: how a worker on any machine finds it.

The file holds the address of the run's own process and the run's token, so whoever may read it may
take part in the run: it is readable by its owner only, and removed when the run ends.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jtrain.io.atomic_write import atomic_write
from jtrain.io.regular_files import read_json
from jtrain.server.processes.process import ADDRESS, TOKEN

FILE, MOST = ".server.json", 1 << 16  # copies in an object store have no file with a dot


@contextlib.contextmanager
def announced(directory: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Announce the variables of a run in its directory, in a `with` block.

    The announcement of a run that fails stays, as that of one that is killed: workers that joined
    wait for the next start. Without it they end with the run.
    """
    path = directory / FILE
    atomic_write(path, json.dumps(dict(environ)).encode(), 0o600)
    yield
    if read_announcement(directory) == environ:  # not that of another start
        path.unlink(missing_ok=True)


def read_announcement(directory: Path) -> dict[str, str] | None:
    """Return the variables that a run has announced; None if it is not there."""
    try:
        found = read_json(directory / FILE, most=MOST, inside=directory)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {ADDRESS, TOKEN} <= found.keys() else None
