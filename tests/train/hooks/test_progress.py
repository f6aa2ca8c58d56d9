import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import numpy as np
import pytest

from jtrain.core.loop import train_loop
from jtrain.core.mean import Mean
from jtrain.train.hooks import ProgressBar
from jtrain.train.hooks.live_cell import LossCurve

_SCRIPT = """
import itertools, os, signal, sys, time
import numpy as np
from jtrain.train.hooks import LogLines, LogHook, ProgressBar, Speed
from jtrain.core.loop import train_loop
from jtrain.core.mean import Mean

def step(state, batch):
    time.sleep(4e-3)
    return state + 1, {"loss": Mean(np.float32(100 - state), np.float32(4))}

signal.signal(signal.SIGINT, signal.default_int_handler)
speed = Speed(None, every=5, stop=200, rows=2, tokens=64)
with ProgressBar(stop=200, speed=speed, valid=lambda: 2.5) as progress:
    lines = LogLines(sys.argv[1], screen=progress.print, live=progress.live)
    log = LogHook(every=50, stop=200, log=lines.note)
    lines.print("a warning [not markup]")
    train_loop(step, 0, itertools.repeat({}), start=0, stop=200, hooks=[speed, log, progress])
    if sys.argv[2:]:
        with progress.during("evaluating"):
            os.write(2, b"waits")  # when rich has drawn, and is not interrupted within
            time.sleep(60)
print("live", progress.live, "rich" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    # A CI may set what makes rich believe that every file is a terminal, or none.
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)


def in_terminal(*arguments, interrupt_at=None):
    """Return what a process writes to a terminal, and its exit code."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", _SCRIPT, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written, end = "", time.monotonic() + 300
    while time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                written += os.read(master, 65536).decode()
            except OSError:  # the other side is closed
                break
        if interrupt_at and interrupt_at in written:
            process.send_signal(signal.SIGINT)
            interrupt_at = None
    os.close(master)
    return written, process.wait(timeout=300)


@pytest.mark.thorough
def test_a_terminal_has_a_live_line(tmp_path):
    began = time.monotonic()
    written, code = in_terminal(tmp_path / "log.txt")
    seconds = time.monotonic() - began
    assert code == 0, written
    steps = [int(step) for step in re.findall(r"(\d+)/200", written)]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 4  # 0.8 s of training and more
    assert len(steps) <= max(seconds, 5) * 10 + 5
    assert steps[-1] == 200
    assert "\x1b[2K" in written  # a line that was drawn again
    assert re.search(r"200/200  loss -24\.7500  valid 2\.5000  [\d.]+k tokens/s", written)
    assert "step  50/200" not in written
    assert "a warning [not markup]" in written
    assert written.rstrip().endswith("live True True")
    assert (tmp_path / "log.txt").read_text().count("\n") == 5  # the warning, four of the log


@pytest.mark.thorough
def test_a_file_has_plain_lines(tmp_path):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "log.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "a warning [not markup]"
    assert lines[1].startswith("step  50/200  loss")
    assert lines[:5] == (tmp_path / "log.txt").read_text().splitlines()
    assert lines[5:] == ["live False False"]  # nothing imported rich


@pytest.mark.thorough
def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path):
    written, code = in_terminal(tmp_path / "log.txt", "wait", interrupt_at="waits")
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in written
    assert_cursor_is_shown(written)


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


def test_a_terminal_that_cannot_draw_has_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as (stream, written), ProgressBar(stop=9, stream=stream) as progress:
        progress.on_numbers(9, {"loss": 1.0})
        progress.print("a line")
        assert not progress.live
        assert written() == "a line\r\n"


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


def test_a_finished_run_is_drawn_to_its_end_by_calls_that_do_not_divide_it(tmp_path):
    path, one = tmp_path / "screen", np.ones(2, np.float32)
    step = lambda state, batch: (state, {"loss": Mean(one, one)})
    with (
        screen(path, terminal=True) as stream,
        ProgressBar(stop=5, steps_per_call=2, stream=stream) as progress,
    ):
        lengths = lambda first: min(2, 5 - first)
        train_loop(step, 0, [{}] * 3, start=0, stop=5, hooks=[progress], steps_per_call=lengths)
    assert "5/5  loss 1.0000" in path.read_text(encoding="utf-8")


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


def test_an_error_in_a_notebook_leaves_the_line(cell):
    with pytest.raises(RuntimeError), ProgressBar(stop=9, stream=cell):
        fail()
    assert cell.shown() == ["─" * 20 + "  0/9", ""]


def test_a_kernel_with_rich_output_has_one_display_that_is_replaced(cell):
    shell_module = pytest.importorskip(
        "IPython.core.interactiveshell", reason="pip install ipykernel"
    )
    from IPython.core.displaypub import CapturingDisplayPublisher

    shell = shell_module.InteractiveShell.instance()
    clock, published = [0.0], CapturingDisplayPublisher(parent=shell)
    before, shell.display_pub = shell.display_pub, published
    try:
        curve = LossCurve(every=1, earlier={-5: 3.0}, valid=lambda: {500: 2.0})
        with ProgressBar(
            stop=1000, stream=cell, clock=lambda: clock[0], curves=curve.curves
        ) as progress:
            for step in range(1, 1001):
                curve.on_numbers(step, {"loss": 1 / step})
            progress.print("a warning")
            look_at(progress, clock, 1000, seconds=0.01)
    finally:
        shell.display_pub = before
        type(shell).clear_instance()
    first, *later = published.outputs
    assert not first.get("update")
    assert later
    assert all(output["update"] for output in later)
    assert {output["transient"]["display_id"] for output in later} == {
        first["transient"]["display_id"]
    }
    page = later[-1]["data"]["text/html"]
    root = ElementTree.fromstring(f"<p>{page}</p>")
    assert "1000/1000  loss 1.0000" in "".join(root.itertext())
    assert "width:100.0%" in page
    assert page.count("<polyline") == page.count("<circle") == 1, "train has a line, valid a dot"
    assert len(page) < 20_000
    assert cell.shown() == ["a warning", ""], "the text of the cell has what is printed, alone"


def test_a_command_of_a_cell_has_lines_although_it_has_a_terminal(monkeypatch):
    parent, child = pty.openpty()
    with os.fdopen(parent), os.fdopen(child, "w") as stream:
        monkeypatch.setenv("TERM", "xterm-color")
        assert ProgressBar(stop=9, stream=stream).live
        monkeypatch.setenv("JPY_PARENT_PID", "1")
        assert not ProgressBar(stop=9, stream=stream).live


def test_a_curve_has_at_most_its_points_and_both_ends():
    curve = LossCurve(every=10)
    step = 0
    while step < 100_000:
        step += curve.every
        curve.on_numbers(step, {"loss": 1.0, "accuracy": 0.5})
    points = curve.curves()["train"]
    assert LossCurve.most / 2 <= len(points) <= LossCurve.most
    assert min(points) == 10
    assert max(points) >= 100_000 - curve.every
