import contextlib
import io
import os
import pty
import select
import sys
import types
from xml.etree import ElementTree

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


def look_at(progress, clock, steps, *, seconds, first=1, last=None):
    """Return the steps that were drawn, of steps that take `seconds` each."""
    looks = []
    for step in range(first, first + steps):
        clock[0] += seconds
        if step % progress.every == 0 or step == last:
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
        rest = look_at(progress, clock, 45_000, seconds=1e-4, first=155_001, last=200_000)
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


class OutStream(io.StringIO):
    """The stdout of a notebook's kernel, as far as a program can see."""

    __module__ = "ipykernel.iostream"


def test_a_cell_has_one_output_with_the_curves_that_is_replaced(monkeypatch):
    pages = []

    class Display:
        def update(self, data, *, raw):
            assert raw
            pages.append(data["text/html"])

    def display(data, *, raw, display_id):
        assert display_id
        assert not pages, "one output"
        Display().update(data, raw=raw)
        return Display()

    ipython = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    stream, clock = OutStream(), [0.0]
    assert not stream.isatty()
    with ProgressBar(
        stop=1000,
        stream=stream,
        valid=lambda: {100: 0.5},
        earlier=lambda: {50: 3.0},
        clock=lambda: clock[0],
    ) as progress:
        assert progress.live
        progress.print("a warning [not markup]")
        look_at(progress, clock, 1000, seconds=0.01)
    assert 10 < len(pages) < 35  # twice a second of ten
    assert "1000/1000" in pages[-1]
    assert "loss 1.0000" in pages[-1]
    root = ElementTree.fromstring(f"<div>{pages[-1]}</div>")
    lines = [line.get("points", "") for line in root.iter() if line.tag.endswith("polyline")]
    assert 100 < len(lines[0].split()) < 205, "the losses of the training"
    assert len(lines) == 2
    assert stream.getvalue() == "a warning [not markup]\n"
