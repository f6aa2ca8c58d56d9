"""A failed write is reported by one error, without its consequential errors."""

import gc
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jtrain.checkpoint.orbax_logging import hide_failures

STEPS = 12
SAVES = """\
import resource, sys
from pathlib import Path

import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager
from jtrain.checkpoint.save_errors import SaveError

resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
state = {f"w{i}": jnp.full((100, 100), i) for i in range(160)}
with CheckpointManager(Path(sys.argv[1])) as checkpoints:
    for step in range(1, int(sys.argv[2]) + 1):
        try:
            checkpoints.save(step, state, {})
            checkpoints.wait()
        except SaveError as error:
            print(error)
"""


@pytest.mark.thorough
def test_a_failed_write_is_reported_in_one_line(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path / "kept"), str(STEPS)],
        capture_output=True,
        text=True,
    )
    lines = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr, len(lines)) == (0, "", STEPS)
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"checkpoint {step} could not be written to {tmp_path}/kept: it ")
        assert line.endswith(
            "raise the limit (ulimit -f), and run again: it restarts from the beginning."
        )


def test_only_messages_of_orbax_are_hidden(caplog: pytest.LogCaptureFixture):
    hide_failures()
    log = logging.getLogger("asyncio")
    text = (
        'OUT_OF_RANGE: Error writing "w/0.0" in OCDBT database at local file "kept": File too large'
    )
    for error in (ValueError(text), ValueError("mine"), OSError("Error writing mine")):
        log.error("Future exception was never retrieved", exc_info=(type(error), error, None))
    lost = "Task was destroyed but it is pending! task: <Task coro=<f() at /site/{}/x.py:9>>"
    for whose in ("orbax/checkpoint", "mine"):
        log.error(lost.format(whose))
    told = [f"{record.exc_info[1] if record.exc_info else record.msg}" for record in caplog.records]
    assert told == ["mine", "Error writing mine", lost.format("mine")]


def test_only_coroutines_of_orbax_may_stay_unawaited():
    async def async_serialize_from_host() -> None:
        """Name of a coroutine of Orbax."""

    async def mine() -> None:
        """Name of a foreign coroutine."""

    for each in (async_serialize_from_host, mine):
        each.__qualname__ = each.__name__
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hide_failures()
        for each in (async_serialize_from_host, mine):
            each()
        gc.collect()
    assert [str(each.message) for each in told] == ["coroutine 'mine' was never awaited"]


def test_coroutines_left_by_a_failed_save_may_be_collected_in_a_later_test():
    async def write_fragment() -> None:
        """Name of a coroutine of Orbax."""

    write_fragment.__qualname__ = "async_serialize_from_host.<locals>.write_fragment"
    write_fragment()
    gc.collect()  # a warning here would be an error (conftest.py)
