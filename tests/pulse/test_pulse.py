"""The pulse: what one process says, another reads, whatever the first is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jtrain.pulse import Pulse, read
from jtrain.pulse.pulse import FOLDER, file_of, stacks_of


def test_another_reads_what_was_said_last(tmp_path: Path):
    path = tmp_path / "pulse"
    assert read(path).number == 0, "nobody has spoken"
    pulse = Pulse(path)
    pulse.begins(tmp_path / "runs" / "möwe", grace=12.5)
    pulse.beat("hooks", 7)
    pulse.kept(5)
    beat = read(path)
    assert (beat.phase, beat.step, beat.kept, beat.grace) == ("hooks", 7, 5, 12.5)
    assert beat.run == str(tmp_path / "runs" / "möwe")
    assert abs(beat.seconds - time.monotonic()) < 60
    assert pulse.now() == beat


def test_a_phase_within_a_phase_gives_way_to_it(tmp_path: Path):
    pulse = Pulse()
    pulse.beat("step", 3)
    with pulse.during("eval"), pulse.during("save"):
        assert pulse.now().phase == "save"
    assert (pulse.now().phase, pulse.now().step) == ("step", 3)
    assert pulse.now().number == 5


def test_each_beat_is_read_whole_while_it_is_written(tmp_path: Path):
    path = tmp_path / "pulse"
    code = (
        "import sys, time; from pathlib import Path; from jtrain.pulse import Pulse\n"
        "pulse, step = Pulse(Path(sys.argv[1])), 0\n"
        "end = time.monotonic() + 1.0\n"
        "while time.monotonic() < end:\n"
        "    step += 1; pulse.beat('hooks' if step % 2 else 'data', step)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    seen = []
    while writer.poll() is None:
        seen.append(read(path))
    assert writer.returncode == 0
    assert len({beat.number for beat in seen}) > 10
    assert all(beat.number == beat.step for beat in seen)
    assert all(beat.phase == ("hooks" if beat.step % 2 else "data") for beat in seen if beat.step)


def test_one_who_is_watched_shows_its_stacks_even_when_no_python_runs(tmp_path: Path):
    code = (
        "import ctypes; from jtrain.pulse import PULSE\n"
        "PULSE.beat('data', 4)\n"
        "def stuck_in_c(): ctypes.PyDLL(None).sleep(60)  # holds the GIL\n"
        "stuck_in_c()"
    )
    env = {**os.environ, FOLDER: str(tmp_path), "JTRAIN_PROCESS": "3"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        deadline = time.monotonic() + 60
        while read(file_of(tmp_path, 3)).number == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGUSR2)
        while "stuck_in_c" not in (text := stacks_of(tmp_path, 3).read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def test_what_a_process_starts_does_not_speak_for_it(tmp_path: Path):
    code = (
        "import os, subprocess, sys; from jtrain.pulse import PULSE\n"
        "child = 'from jtrain.pulse import PULSE; PULSE.beat(\"save\", 99)'\n"
        "PULSE.beat('data', 4); subprocess.run([sys.executable, '-c', child], check=True)"
    )
    env = {**os.environ, FOLDER: str(tmp_path), "JTRAIN_PROCESS": "0"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert read(file_of(tmp_path, 0)).step == 4
