"""Reads ahead of the loop and workers: the same batches, errors at their step, nothing left."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from listening import descendants
from plain_environ import until

from jtrain.data import Arrays, InOrder, LoaderBatches, ReadAhead, Shuffled
from jtrain.data.batches.workers import Workers
from jtrain.data.images.augment import Augment, Augmented
from jtrain.errors import DataError

KINDS = ["threads", "processes"]


def images() -> Shuffled:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (50, 6, 6, 3), np.uint8)
    return Shuffled(Arrays(image=image, label=np.arange(50) % 7), size=8, seed=3, end="pad")


class Failing:
    """Batches of which one cannot be read, ends the process, or takes long."""

    def __init__(self, at: int = -1, how: str = "raise", seconds: float = 0.0):
        self.at, self.how, self.seconds = at, how, seconds

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        if step == self.at:
            if self.how == "raise":
                raise DataError(f"row {step} is damaged. Fix it.")
            if self.how == "leave":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": np.full((4, 4), step), "process": np.array([os.getpid()])}


def read_all(reader, start: int, stop: int) -> list[dict[str, np.ndarray]]:
    try:
        return [reader(step) for step in range(start, stop)]
    finally:
        reader.close()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check after each test that no reading process or thread is left."""
    yield
    gc.collect()
    until(lambda: readers() == 0)
    assert multiprocessing.active_children() == []
    assert "read-batches" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_reads_the_same_batches(kind: str):
    changed = Augmented(images(), Augment(flip=0.5, crop=1, mixup=0.2), classes=7).shard(1, 2)
    for count, start in [(3, 5)] if kind == "processes" else [(1, 0), (2, 5), (3, 11)]:
        workers, stop = Workers(kind=kind, count=count), start + 9
        got = read_all(workers.build(changed.__getitem__, start=start, stop=stop), start, stop)
        for step, batch in enumerate(got, start):
            expected = changed[step]
            assert batch.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name], array, strict=True)
                assert type(batch[name]) is np.ndarray


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.thorough)])
def test_an_error_is_raised_at_its_step(kind: str):
    reader = Workers(kind=kind, count=2).build(Failing(at=5).__getitem__, start=0, stop=20)
    with ReadAhead(reader, start=0, stop=20, close=reader.close) as ahead:
        assert [int(next(ahead)["x"][0, 0]) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match="row 5 is damaged") as caught:
            next(ahead)
    if kind == "processes":
        assert "in __getitem__" in "".join(caught.value.__notes__)


def test_streams_are_refused():
    loaded = LoaderBatches(lambda: [{"x": np.zeros(4)}], size=4)
    with pytest.raises(DataError, match=r"streamed \(LoaderBatches\).* Set workers.count=0"):
        Workers(count=2).check(loaded)
    Workers().check(loaded)
    Workers(count=2).check(images())
    Workers(count=2).check(InOrder(images().source, size=4))


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from test_workers import Failing
from jtrain.data.batches.process_workers import ProcessWorkers
from jtrain.errors import PeerError

def handle(number, frame):
    os.write(1, b"asked\\n")

def report(reader, steps):
    began = time.monotonic()
    try:
        for step in steps:
            reader(step)
    except PeerError as error:
        print(error, flush=True)
    assert time.monotonic() - began < 60, "it hangs"
    reader.close()

if __name__ == "__main__":
    if sys.argv[1] == "dies":
        for how in "kill", "leave":
            batches = Failing(at=3, how=how)
            report(ProcessWorkers(batches.__getitem__, 2, start=0, stop=50), range(50))
        reader = ProcessWorkers(Failing(seconds=0.02).__getitem__, 2, start=0, stop=None)
        os.kill(int(reader(0)["process"][0]), signal.SIGKILL)
        report(reader, range(1, 5000))
        sys.exit()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    reader = ProcessWorkers(Failing(seconds=0.05).__getitem__, 2, start=0, stop=None)
    print("starts", flush=True)
    for step in range(31):
        reader(step)
        os.write(1, b"%d\\n" % step)
    reader.close()
"""


@pytest.fixture
def script(tmp_path: Path):
    """Start a reading process in a session of its own, with the given mode."""
    path, processes = tmp_path / "reads.py", list[subprocess.Popen[str]]()
    path.write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent)))

    def begin(what: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, str(path), what]
        run = subprocess.Popen(command, start_new_session=True, env=env, **pipes)
        processes.append(run)
        return run

    yield begin
    for run in processes:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def line(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


@pytest.mark.thorough
def test_a_worker_that_dies_is_reported(script):
    """Report a worker that kills itself, one that exits, and one that is killed at any time."""
    run = script("dies")
    said, _ = run.communicate(timeout=200)
    kills, leaves, killed = said.splitlines()
    signal_9 = r"was ended by signal 9 \(SIGKILL\)"
    for words, how in ((kills, signal_9), (leaves, "ended with exit code 0"), (killed, signal_9)):
        ended = rf"one of them, process \d+, {how} before it sent the batch of step \d+"
        assert re.search(ended, words)
        assert "workers.count=2" in words
        assert "lower workers.count" in words
    assert run.returncode == 0


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.thorough
def test_nothing_outlives_a_process_that_is_killed(script):
    run = script("reads")
    while line(run) != "5":
        pass
    left = descendants(run.pid)
    assert len(left) >= 3, "two workers and the process itself"
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in left if running(pid)]
    assert not any("/dev/shm" in text for text in maps), "no shared memory that could be left"
    run.kill()
    run.wait()
    until(lambda: not any(map(running, left)))


@pytest.mark.thorough
def test_a_signal_to_all_ends_no_worker(script):
    """Send Ctrl-C, or Slurm's SIGTERM, to the process group: the run saves and exits by itself."""
    run = script("reads")
    while line(run) != "starts":
        pass
    os.killpg(run.pid, signal.SIGINT)
    while line(run) != "5":
        pass
    os.killpg(run.pid, signal.SIGTERM)
    said, warned = run.communicate(timeout=300)
    assert said.split().count("asked") == 1
    assert said.split()[-1] == "30"
    assert (run.returncode, warned) == (0, "")


SLOW = 2e-3  # seconds a read, ten times the threshold


def slowly(step: int) -> int:
    time.sleep(SLOW)
    return step * step


def readers() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("get", [slowly, lambda step: step * step], ids=["slow", "fast"])
def test_gives_every_step_once_in_order(get):
    with ReadAhead(get, start=3, stop=40) as ahead:
        assert list(ahead) == [step * step for step in range(3, 40)]
    assert list(ahead) == []


def test_fast_reads_stay_on_the_thread_of_the_loop():
    where = set()
    # The limit is a full second here, so that a busy machine cannot fail this test.
    note = lambda step: where.add(threading.get_ident())
    with ReadAhead(note, start=0, stop=100, slow=1.0) as ahead:
        list(ahead)
    assert where == {threading.get_ident()}


def test_an_error_is_raised_at_its_step_with_its_traceback():
    broken = 30
    error = OSError("the disk is gone")

    def get(step: int) -> int:
        if step == broken:
            raise error
        return slowly(step)

    ahead = ReadAhead(get, start=0, stop=40)
    for step in range(broken):
        assert next(ahead) == step * step
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(ahead)
    assert caught.value is error
    assert "raise error" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_stops_the_thread_at_once():
    begun = []

    def get(step: int) -> None:
        begun.append(step)
        slowly(step)

    ahead = ReadAhead(get, start=0, stop=None)
    for _ in range(12):
        next(ahead)
    assert readers() == 1
    ahead.close()
    before = len(begun)
    until(lambda: readers() == 0)
    assert len(begun) == before, "no read begins any more"
    ahead.close()
    assert list(ahead) == []


@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_data_that_was_read_to_its_end_does_not_end_the_loop(slow: float):
    data = iter(range(12))
    with (
        ReadAhead(lambda step: next(data), start=0, stop=20, slow=slow) as ahead,
        pytest.raises(DataError, match=r"after step 12 raised StopIteration.* for fewer steps"),
    ):
        for _ in ahead:
            pass
