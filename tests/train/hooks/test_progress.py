import contextlib
import io
import os
import pty
import re
import select
import sys

import pytest

from jtrain.train.hooks import ProgressBar


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A CI may set what makes rich believe that every file is a terminal, or none.
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def terminal():
    """Return a stream to a terminal, and a function that returns all its output."""
    master, slave = pty.openpty()

    def written():
        pieces = []
        while select.select([master], [], [], 0.2)[0]:
            pieces.append(os.read(master, 65536))
        return b"".join(pieces).decode()

    with open(slave, "w", encoding="utf-8") as stream:
        yield stream, written
    os.close(master)


def fail():
    raise RuntimeError


def test_an_error_leaves_the_terminal_as_it_was():
    with terminal() as (stream, written):
        before = sys.stdout, sys.stderr
        with pytest.raises(RuntimeError), ProgressBar(stop=9, stream=stream):
            fail()
        assert (sys.stdout, sys.stderr) == before
        assert_cursor_is_shown(written())


def assert_cursor_is_shown(written):
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l") > -1


@contextlib.contextmanager
def screen(path, *, terminal):
    """Return a stream to a file, with a given `isatty`."""
    with path.open("w", encoding="utf-8") as stream:
        stream.isatty = lambda: terminal
        yield stream


def look_at(progress, clock, steps, *, seconds, first=1):
    """Return the steps that were drawn, of steps that take `seconds` each."""
    looks = []
    for step in range(first, first + steps):
        clock[0] += seconds
        if step % progress.every == 0:
            progress.on_numbers(step, {"loss": 1.0})
            looks.append(step)
    return looks


@pytest.mark.thorough
def test_it_draws_a_few_times_a_second_however_fast_the_steps_are(tmp_path):
    clock, path = [0.0], tmp_path / "screen"
    with (
        screen(path, terminal=True) as stream,
        ProgressBar(stop=200_000, stream=stream, clock=lambda: clock[0]) as progress,
    ):
        fast = look_at(progress, clock, 150_000, seconds=1e-4)
        first = [step for step in fast if step <= 4_000]  # all, until it knows how fast they are
        assert len(first) < 2_020
        assert 2 * 15 < len(fast) - len(first) < 10 * 15
        slow = look_at(progress, clock, 5_000, seconds=0.09, first=150_001)
        assert progress.every == 2
        assert 2_000 < len(slow) < 4_000
        rest = look_at(progress, clock, 45_000, seconds=1e-4, first=155_001)
    assert rest[-1] == 200_000
    drawn = path.read_text(encoding="utf-8").count("/200000")
    assert 2 * 15 < drawn < 5 * (15 + 450 + 5)


def test_without_a_live_line_it_checks_once(tmp_path):
    clock, path = [0.0], tmp_path / "screen"
    with (
        screen(path, terminal=False) as stream,
        ProgressBar(stop=1000, stream=stream, clock=lambda: clock[0]) as progress,
    ):
        assert look_at(progress, clock, 1000, seconds=1e-3) == [1000]
        progress.print("a line")
    assert path.read_text() == "a line\n"


class OutStream(io.TextIOWrapper):
    """The stdout of a notebook's kernel, as far as a program can see."""

    __module__ = "ipykernel.iostream"
    mode = "w"

    def __init__(self, path):
        super().__init__(path.open("wb"), encoding="utf-8", newline="\n")
        self._path = path

    def written(self):
        """Return all output."""
        self.flush()
        return self._path.read_bytes().decode()

    def shown(self):
        """Return the lines of the cell; a carriage return moves to the start of the line."""
        lines = []
        for line in self.written().split("\n"):
            cells = ""
            for piece in line.split("\r"):
                cells = piece + cells[len(piece) :]
            lines.append(cells.rstrip())
        return lines


@pytest.fixture
def cell(tmp_path):
    """Return a stream to a notebook's cell."""
    with OutStream(tmp_path / "cell") as stream:
        yield stream


def test_a_notebook_has_one_line_drawn_in_place(cell):
    stream, clock = cell, [0.0]
    assert not stream.isatty()
    with ProgressBar(stop=1000, stream=stream, clock=lambda: clock[0]) as progress:
        assert progress.live
        progress.print("a warning [not markup], which is longer than the line below it is")
        look_at(progress, clock, 600, seconds=0.01)
        before = stream.shown()
        progress.print("another")
        look_at(progress, clock, 400, seconds=0.01, first=601)
    warning, at_600, *nothing = before
    assert (warning.startswith("a warning [not"), nothing) == (True, [])
    assert re.fullmatch(r"━{11,12}─{8,9}  (5[5-9]\d|600)/1000  loss 1.0000", at_600)
    after = stream.shown()
    assert after == [warning, "another", "━" * 20 + "  1000/1000  loss 1.0000", ""]
    assert 10 < stream.written().count("/1000") < 35  # twice a second of ten
    assert "\x1b" not in stream.written()
