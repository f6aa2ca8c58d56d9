"""A run outlives the readers of its output: it ends with a checkpoint."""

import json
import os
import pkgutil
import pty
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from plain_environ import plain_environ, until
from quick_study import SLOW, write_study

from jtrain.io.jsonl import read_rows

# Makes its stdin the controlling terminal: closing it sends SIGHUP to the process.
OF_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
RUN = ("run", "configs/quick.yaml", "steps=100000", "checkpoint.every=0", "evaluate.every=50000")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_study(tmp_path, SLOW)
    (tmp_path / "slow").touch()
    return tmp_path


def asked(
    home: Path, compiled: Path, words: list[str], ask: Callable[[subprocess.Popen], None], **streams
) -> int:
    """Run, act after some steps, and return the exit code."""
    env = plain_environ()
    process = subprocess.Popen(
        words,
        cwd=home,
        env=env | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
        start_new_session=True,
        **streams,
    )
    try:
        until(lambda: len(read_rows(home / "runs" / "quick" / "metrics.jsonl")) >= 5, process)
        ask(process)
        return process.wait(timeout=200)
    finally:
        process.kill()
        process.wait()


def check_nothing_lost(home: Path) -> None:
    """Check that the run stopped with a checkpoint of its last step."""
    said = json.loads((home / "runs" / "quick" / "run.json").read_text())
    assert said["status"] == "stopped"
    assert (home / "runs" / "quick" / "checkpoints" / f"{said['step']}" / "seal.json").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("launched", [("launch", "--processes", "1"), ()])
def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(home, compiled, launched):
    terminal, end = pty.openpty()
    words = [sys.executable, "-c", OF_THE_TERMINAL, sys.executable, "-m", "jtrain"]

    def close(process: subprocess.Popen) -> None:
        os.close(end)
        os.close(terminal)

    streams = {"stdin": end, "stdout": end, "stderr": end}
    assert asked(home, compiled, [*words, *launched, *RUN], close, **streams) == 75
    check_nothing_lost(home)


@pytest.mark.thorough
def test_ctrl_c_that_ends_its_reader_too_loses_nothing(home: Path, compiled: Path):
    """Interrupt `jtrain run CONFIG 2>&1 | tee log.txt`."""
    reader, end = os.pipe()

    def ctrl_c(process: subprocess.Popen) -> None:
        os.close(end)
        os.close(reader)
        time.sleep(0.2)  # the run writes some lines meanwhile
        process.send_signal(signal.SIGINT)

    words = [sys.executable, "-m", "jtrain", *RUN]
    assert asked(home, compiled, words, ctrl_c, stdout=end, stderr=end) == 75
    check_nothing_lost(home)


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


class AloneError(Exception):
    """Raised in place of an exit without the others."""


def ends_alone(code: int) -> None:
    raise AloneError(code)


@pytest.mark.parametrize(("several", "how"), [(True, AloneError), (False, SystemExit)])
def test_the_installed_command_ends_by_itself_where_it_is_one_of_several(several, how, monkeypatch):
    script = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["jtrain"]
    monkeypatch.setattr(sys, "argv", ["jtrain", "rum"])
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    monkeypatch.setattr("jtrain.cli.exit_alone", ends_alone)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(how, match="2"):
        pkgutil.resolve_name(script)()
