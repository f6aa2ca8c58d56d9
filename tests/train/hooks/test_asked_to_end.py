"""A run of the command line that is asked to end exits with 75, whatever it is doing."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from plain_environ import plain_environ
from quick_study import CODE, write_study

from jtrain.distributed.heartbeat import Beat, read_beat
from jtrain.distributed.heartbeat.channel import Channel

SLOW = '''

def nap(where):
    """Sleeps a second where WHERE says."""
    if os.environ.get("WHERE") == where:
        time.sleep(1)


class Slow(Arrays):
    def __getitem__(self, indices):
        if len(self) == 50:
            nap("eval")
        elif HEARTBEAT.now().step > 8:
            for _ in range(60):
                nap("data")
        return super().__getitem__(indices)


def in_c(seconds):
    """Nothing that Python could do anything about: other threads take the signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).sleep(seconds)


def told(params, extra, key):
    for _ in range(30):
        nap("sampling")
    return "a sample"
'''
HEAD = (
    "import ctypes\nimport os\nimport signal\nimport time\n"
    "from jtrain.distributed.heartbeat import HEARTBEAT\n"
)
STUDY = HEAD + (
    CODE.replace("    return Arrays(", "    return Slow(")
    .replace("\n\n@jt.configclass\nclass Data", SLOW + "\n\n@jt.configclass\nclass Data")
    .replace("jt.Experiment(", "jt.Experiment(sample=told,")
    .replace(
        "            x = jnp.tanh(",
        '            os.environ.get("WHERE") == "compile" and in_c(30)\n            x = jnp.tanh(',
    )
)
VALUES = ("evaluate.every=6", "checkpoint.every=0", "steps=30")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_study(tmp_path, STUDY)
    return tmp_path


def begin(
    home: Path, compiled: Path, where: str, channel: Channel, *before: str
) -> subprocess.Popen[str]:
    env = plain_environ()
    env |= {**channel.environ, "WHERE": where, "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    run = [sys.executable, "-W", "error", "-m", "jtrain", "run", "configs/quick.yaml", *VALUES]
    return subprocess.Popen(
        [*before, *run],
        cwd=home,
        env=env,
        pass_fds=channel.files,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def asked(
    home: Path,
    compiled: Path,
    where: str,
    phase: str,
    *signals: signal.Signals,
    gap: float = 0.1,
    before: Sequence[str] = (),
) -> tuple[str, Beat, float]:
    """Return the output of a run signalled in a phase, its last beat and its seconds to end.

    They go to what the run is the child of, where there is something `before` it.
    """
    channel = Channel()
    process, file = begin(home, compiled, where, channel, *before), channel.files.pulse
    try:
        deadline = time.monotonic() + 300
        step = 0 if phase in {"start", "compile"} else 6
        while (beat := read_beat(file)).phase != phase or beat.step < step or beat.number == 0:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, beat
            time.sleep(0.002)
        time.sleep(0.2 if where else 0.0)
        began = time.monotonic()
        for each in signals:
            process.send_signal(each)
            time.sleep(gap)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 75, said
        return said, read_beat(file), time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        channel.close()


def stands(home: Path) -> dict:
    return json.loads((home / "runs" / "quick" / "run.json").read_text())


def gone_on(home: Path, compiled: Path) -> bytes:
    """Resume the run to its end and return its metrics."""
    with Channel() as channel:
        process = begin(home, compiled, "", channel)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return (home / "runs" / "quick" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_in_an_evaluation_it_stops_before_the_next_batch_and_measures_later(
    home: Path, tmp_path_factory: pytest.TempPathFactory, compiled: Path
):
    said, beat, seconds = asked(home, compiled, "eval", "data", signal.SIGUSR1)
    assert beat.step == 6
    assert seconds < 20
    assert "stopped at step 6: asked to end (SIGUSR1)" in said
    assert stands(home)["step"] == 6
    unbroken = tmp_path_factory.mktemp("unbroken")
    write_study(unbroken, STUDY)
    assert gone_on(home, compiled) == gone_on(unbroken, compiled)


@pytest.mark.slow
def test_a_source_that_stalls_does_not_keep_it_from_saving(home: Path, compiled: Path):
    said, beat, seconds = asked(home, compiled, "data", "data", signal.SIGTERM)
    assert seconds < 20
    assert f"stopped at step {beat.step}: asked to end (SIGTERM)" in said
    assert stands(home)["step"] == beat.step >= 6
    assert (home / "runs" / "quick" / "checkpoints" / f"{beat.step}" / "seal.json").exists()


@pytest.mark.slow
def test_a_compiler_that_does_not_come_back_has_nothing_to_save(home: Path, compiled: Path):
    said, beat, seconds = asked(home, compiled, "compile", "compile", signal.SIGTERM)
    assert seconds < 10
    assert beat.step == 0
    assert "received SIGTERM: nothing to save; the same command resumes" in said


@pytest.mark.slow
def test_while_it_samples_the_last_state_is_kept_and_it_samples_later(home: Path, compiled: Path):
    said, _, seconds = asked(home, compiled, "sampling", "sampling", signal.SIGINT)
    assert seconds < 20
    assert "stopped at step 30: interrupted (Ctrl-C)" in said
    assert stands(home)["status"] == "stopped"
    gone_on(home, compiled)
    assert (home / "runs" / "quick" / "samples.txt").read_text() == "a sample\n"


def kept(home: Path) -> int:
    """Return the step that the run stopped at, which has a sealed checkpoint."""
    said = stands(home)
    assert said["status"] == "stopped"
    assert (home / "runs" / "quick" / "checkpoints" / f"{said['step']}" / "seal.json").exists()
    return said["step"]


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("signals", "gap", "before"),
    [
        # `timeout` hands it to its child, and then to the group of both.
        ((TERM,), 0.0, ("timeout", "500")),
        pytest.param((TERM, TERM), 0.0, (), marks=pytest.mark.slow),
        pytest.param((INT, INT), 0.05, (), marks=pytest.mark.slow),
        pytest.param((USR1, TERM, HUP, TERM), 0.02, (), marks=pytest.mark.slow),
        pytest.param((HUP,), 0.0, (), marks=pytest.mark.slow),
    ],
)
def test_signals_close_together_are_one_and_the_checkpoint_is_kept(
    home: Path, compiled: Path, signals: Sequence[signal.Signals], gap: float, before: Sequence[str]
):
    said, beat, _ = asked(home, compiled, "data", "data", *signals, gap=gap, before=before)
    assert kept(home) == beat.step >= 6
    name = signals[0].name
    assert said.count(f"{name}: stopping after this step. From 2 s on a second signal stops") == 1
    assert f"stopped at step {beat.step}: " in said
    assert "ended at once" not in said


@pytest.mark.thorough
def test_nohup_still_means_that_a_closed_terminal_is_no_reason_to_end(home: Path, compiled: Path):
    said, beat, _ = asked(home, compiled, "data", "data", HUP, TERM, gap=0.3, before=("nohup",))
    assert kept(home) == beat.step
    assert "asked to end (SIGTERM)" in said


# A run that has steps to lose, and whose main thread is in C.
STUCK = """
import ctypes, signal, sys
from jtrain.train.hooks import Signals
from jtrain.distributed.heartbeat import HEARTBEAT, shutdown_request
from jtrain.distributed.heartbeat.early_signals import exit_on_early_signals

shutdown_request.REPEATS = float(sys.argv[1])
exit_on_early_signals()
HEARTBEAT.beat("step", 5)
with Signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # other threads take it
    print("now", flush=True)
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.thorough
def test_a_second_signal_ends_at_once_what_is_stuck():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "From 3 s on a second signal stops at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(3.1)
        assert process.poll() is None, "that was the first one again"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 75
        assert "received a second signal (SIGTERM): exited at once" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
