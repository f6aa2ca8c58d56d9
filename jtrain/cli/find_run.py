"""The run that a verb is about, which of its steps, and who says what was found."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jtrain.errors import CheckpointError
from jtrain.io.private_files import check_no_links
from jtrain.train.find_run import find_run

OUTPUT, COMPLAINTS = 1, 2  # what a process has open from the first


def config_of(run: str, verb: str) -> Path:
    """The config of a run, by its directory or its name in runs/.

    Raises:
        ConfigError: if there is no such run, or a link leads out of its directory.
    """
    directory = find_run(run, f"jtrain {verb}")
    check_no_links(directory)
    return directory / "config.yaml"


def speaks() -> bool:
    """Whether this process prints what was found: the first of those that found it together."""
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def said_apart() -> Iterator[None]:
    """Within, what is printed goes where complaints go: gloo tells of its connections by C++."""
    sys.stdout.flush()
    output = os.dup(OUTPUT)
    os.dup2(COMPLAINTS, OUTPUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, OUTPUT)
        os.close(output)


def complain(line: str) -> None:
    """Print a line where complaints go."""
    print(line, file=sys.stderr)


def asked_step(step: str, verb: str) -> int | Literal["newest", "best"]:
    """The step that was asked for, by number or by word."""
    if step == "newest" or step == "best":
        return step
    if step.isdigit():
        return int(step)
    raise CheckpointError(
        f"jtrain {verb}: --step {step} is no step; write newest, best or a number"
    )
