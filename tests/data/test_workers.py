"""Workers: the same batches, errors at their step, and nothing left behind."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from listening import descendants

from jtrain.data import Arrays, InOrder, LoaderBatches, ReadAhead, Shuffled, TokenFiles, Windows
from jtrain.data.batches.process_workers import ENDS, LARGEST, ProcessWorkers
from jtrain.data.batches.stacked import StackedBatches
from jtrain.data.batches.workers import Workers
from jtrain.data.images.augment import Augmentation, Augmented
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
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
            if self.how == "exit":
                sys.exit(3)
            if self.how == "leave":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": np.full((4, 4), step), "process": np.array([os.getpid()])}


def read_all(reader, start: int, stop: int) -> list[dict[str, np.ndarray]]:
    try:
        return [reader(step) for step in range(start, stop)]
    finally:
        reader.close()


def soon(condition, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check after each test that no reading process or thread is left."""
    yield
    assert multiprocessing.active_children() == []
    names = {thread.name for thread in threading.enumerate()}
    assert "receive-batches" not in names


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_reads_the_same_batches(kind: str):
    changed = Augmented(images(), Augmentation(flip=0.5, crop=1, mixup=0.2), classes=7).shard(1, 2)
    for count, start in [(3, 5)] if kind == "processes" else [(1, 0), (2, 5), (3, 11)]:
        workers, stop = Workers(kind=kind, count=count), start + 9
        got = read_all(workers.build(changed.__getitem__, start=start, stop=stop), start, stop)
        for step, batch in enumerate(got, start):
            expected = changed[step]
            assert batch.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name], array, strict=True)
                assert type(batch[name]) is np.ndarray


def test_row_and_mask_stay_the_same_objects():
    """Keep the objects, so that they are put on the devices once."""
    got = read_all(ProcessWorkers(images().__getitem__, start=0, stop=7, workers=2), 0, 7)
    assert len({id(batch["row"]) for batch in got}) == 1
    assert len({id(batch["mask"]) for batch in got}) == 2  # the last of an epoch is padded
    assert not got[0]["row"].flags.writeable


def test_stacked_calls_keep_their_masks_when_threads_read_them():
    calls = StackedBatches(Plain(images()), steps=7)
    expected = [calls[call] for call in range(20)]
    for _ in range(20):
        reader = Workers(count=8).build(calls.__getitem__, start=0, stop=20)
        for one, other in zip(read_all(reader, 0, 20), expected, strict=True):
            np.testing.assert_array_equal(one["mask"], other["mask"])


class Plain:
    """Batches without `read_stacked`."""

    def __init__(self, batches: Shuffled):
        self._batches = batches

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self._batches[step]


def test_a_mapped_file_is_sent_as_its_name(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 40, encoding="utf-8")
    prepare(tmp_path / "a.txt", tmp_path / "a", tokenizing=ByteTokens(), by="line", shard=300)
    np.save(tmp_path / "b.npy", np.arange(5000, dtype=np.uint16))
    mapped = np.load(tmp_path / "b.npy", mmap_mode="r")[100:4000]
    folder = Shuffled(Windows(TokenFiles(tmp_path / "a"), context=7), size=8)
    part = Shuffled(Windows(mapped, context=64), size=8)
    both = {"folder": folder, "part": part}
    reader = ProcessWorkers(Named(both).__getitem__, start=0, stop=4, workers=1)
    assert len(reader.payload) < 20_000, "the windows of the part alone would be 500 kB"
    for step, batch in enumerate(read_all(reader, 0, 4)):
        for name, batches in both.items():
            np.testing.assert_array_equal(batch[name], batches[step]["tokens"])


class Named:
    """Return the tokens of several batches, by name."""

    def __init__(self, batches: dict[str, Shuffled]):
        self.batches = batches

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return {name: each[step]["tokens"] for name, each in self.batches.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_at_once_and_ahead(kind: str):
    reader = Workers(kind=kind, count=4).build(Timed().__getitem__, start=0, stop=60)
    asked, reads = [], []
    for step in range(41):
        asked.append(time.monotonic())
        reads.append(tuple(reader(step)["read"]))
    reader.close()
    at_once = [sum(began <= moment < ended for began, ended in reads) for moment, _ in reads]
    assert max(at_once) == 4
    assert sum(began < time for (began, _), time in zip(reads, asked, strict=True)) > 20


class Timed:
    """Batches with the moments between which they were read, by the clock of all processes."""

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        began = time.monotonic()
        time.sleep(0.1)
        return {"read": np.array([began, time.monotonic()])}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_at_its_step(kind: str):
    reader = Workers(kind=kind, count=2).build(Failing(at=5).__getitem__, start=0, stop=20)
    with ReadAhead(reader, start=0, stop=20, close=reader.close) as ahead:
        assert [int(next(ahead)["x"][0, 0]) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(DataError, match="row 5 is damaged") as caught:
            next(ahead)
    if kind == "processes":
        assert "in __getitem__" in "".join(caught.value.__notes__)


def test_a_source_that_exits_is_reported_at_its_step():
    reader = ProcessWorkers(Failing(at=1, how="exit").__getitem__, start=0, stop=9, workers=1)
    with pytest.raises(SystemExit):
        read_all(reader, 0, 9)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_closing_in_the_middle_leaves_no_process_or_thread(kind: str):
    workers = Workers(kind=kind, count=2)
    reader = workers.build(Failing(seconds=0.05).__getitem__, start=4, stop=None)
    reader(4)
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < ENDS, "no wait for a process or a thread was in vain"
    reader.close()


def test_closing_ends_a_thread_that_awaits_a_batch():
    reader = ProcessWorkers(Failing(seconds=60).__getitem__, start=0, stop=None, workers=1)

    def awaits() -> None:
        with pytest.raises(RuntimeError, match="closed while a batch was awaited"):
            reader(0)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=awaits, daemon=True)
    thread.start()
    reader.close()
    thread.join(60)
    assert ended == [True]


def test_a_process_that_starts_later_than_its_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jtrain.data.batches.process_workers.ENDS", 0.0)
    ProcessWorkers(Failing(seconds=600).__getitem__, start=0, stop=None, workers=3).close()
    assert soon(lambda: "receive-batches" not in {t.name for t in threading.enumerate()})
    assert soon(lambda: not multiprocessing.active_children())


def test_data_that_cannot_be_sent_is_reported():
    held = threading.Lock()
    with pytest.raises(DataError, match=r"cannot be sent .*pickle.* Set workers.kind=threads"):
        ProcessWorkers(lambda step: {"x": held}, start=0, stop=3, workers=2)


def test_data_too_large_to_send_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jtrain.data.batches.process_workers.LARGEST", 1 << 12)
    with pytest.raises(DataError, match=r"MB in memory; at most .* Set workers.kind=threads"):
        ProcessWorkers(images().__getitem__, start=0, stop=3, workers=2)
    assert LARGEST == 512 << 20


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
            report(ProcessWorkers(batches.__getitem__, start=0, stop=50, workers=2), range(50))
        reader = ProcessWorkers(Failing(seconds=0.02).__getitem__, start=0, stop=None, workers=2)
        os.kill(int(reader(0)["process"][0]), signal.SIGKILL)
        report(reader, range(1, 5000))
        sys.exit()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    reader = ProcessWorkers(Failing(seconds=0.05).__getitem__, start=0, stop=None, workers=2)
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
        run = subprocess.Popen(
            [sys.executable, str(path), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
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


def test_a_worker_that_dies_is_reported(script):
    """Report a worker that kills itself, one that exits, and one that is killed at any time."""
    run = script("dies")
    said, _ = run.communicate(timeout=200)
    kills, leaves, killed = said.splitlines()
    signal_9 = r"was ended by signal 9 \(SIGKILL\)"
    for words, how in ((kills, signal_9), (leaves, "ended with exit code 0"), (killed, signal_9)):
        assert re.search(
            rf"one of them, process \d+, {how} before it sent the batch of step \d+", words
        )
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
    assert soon(lambda: not any(map(running, left)))


@pytest.mark.thorough
def test_a_signal_to_all_ends_no_worker(script):
    """Send Ctrl-C, or Slurm's SIGTERM, to the process group: the run saves and exits by itself."""
    run = script("reads")
    while line(run) != "starts":
        pass
    time.sleep(0.3)  # the workers have started, and do not read yet
    os.killpg(run.pid, signal.SIGINT)
    while line(run) != "5":
        pass
    os.killpg(run.pid, signal.SIGTERM)
    said, warned = run.communicate(timeout=300)
    assert said.split().count("asked") == 1
    assert said.split()[-1] == "30"
    assert (run.returncode, warned) == (0, "")
