"""A notebook cell that is interrupted and run again resumes."""

import signal
import threading
from pathlib import Path

import pytest
from quick_study import at_home, config_of, kept, write_study

import jtrain as jt


class Interrupts(jt.Hook):
    """Sends Ctrl-C to this process, once, after a step."""

    def __init__(self, step: int):
        self.every = step

    def on_state(self, step, state, metrics):
        signal.raise_signal(signal.SIGINT)
        self.every = 10**9


def test_it_resumes_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    interrupts, ends = Interrupts(4), []
    before = signal.getsignal(signal.SIGINT)
    for home, hooks, times in (("calm", [], 1), ("cell", [interrupts], 2)):
        (tmp_path / home).mkdir()
        config = write_study(tmp_path / home)
        at_home(tmp_path / home, monkeypatch, compiled)
        for _ in range(times):
            ends.append(jt.run(config_of(config), hooks=hooks))
        ends.append(kept(ends[-1]))
    calm, unbroken, interrupted, again, state = ends
    assert (calm.status, calm.step) == ("done", 12)
    assert (interrupted.status, interrupted.step) == ("stopped", 4)
    assert (again.status, again.step) == ("done", 12)
    assert state == unbroken, "bit for bit, and row for row"
    assert signal.getsignal(signal.SIGINT) == before
    left = [t.name for t in threading.enumerate() if t.name in {"guard", "watchdog"}]
    assert left == []
