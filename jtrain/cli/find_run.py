"""Run and step that a verb is about, and the output of its processes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jtrain.cli.output import print_text as print
from jtrain.errors import CheckpointError
from jtrain.io.regular_files import check_no_links
from jtrain.train.run_record import find_run

STDOUT, STDERR = 1, 2  # file descriptors


def find_config(run: str, verb: str) -> Path:
    """Return the config of a run, by its directory or its name in runs/.

    Raises:
        ConfigError: if the run does not exist, or a link leads out of its directory.
    """
    directory = find_run(run, f"jtrain {verb}")
    check_no_links(directory)
    return directory / "config.yaml"


def is_first_process() -> bool:
    """Return whether this process prints the results: the first process does."""
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def redirect_output() -> Iterator[None]:
    """Redirect stdout to stderr: gloo prints its connections to stdout from C++."""
    sys.stdout.flush()
    stdout = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, STDOUT)
        os.close(stdout)


def print_error(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr)


def parse_step(step: str, verb: str) -> int | Literal["newest", "best"]:
    """Return the requested step: a number, newest or best."""
    if step == "newest" or step == "best":
        return step
    if step.isdigit():
        return int(step)
    raise CheckpointError(
        f"jtrain {verb}: --step {step} is not a step; write newest, best or a number"
    )
