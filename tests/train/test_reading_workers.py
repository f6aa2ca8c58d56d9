"""A run gives the same bits, whichever workers read its batches."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import descendants
from quick_study import CODE, YAML, at_home, kept, trained, write_study

import jtrain as jt
from jtrain.errors import DataError, PeerError

CONFIG = "configs/quick.yaml"
OWN = '''

class Own:
    """A source of the experiment's own, as a worker process has to find it."""

    def __init__(self, source, dies=-1):
        self.source, self.dies = source, dies

    def __len__(self):
        return len(self.source)

    def __getitem__(self, indices):
        if self.dies in indices:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source[indices]
'''
THREADS = ("workers.count=3", "workers.ahead=1")
PROCESSES = ("workers.count=2", "workers.kind=processes")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    code = CODE.replace("Shuffled(train,", "Shuffled(Own(train),") + OWN
    write_study(tmp_path / "home", code, YAML)
    at_home(tmp_path / "home", monkeypatch, compiled)


class StopAt(jt.Hook):
    every = 1

    def __init__(self, step: int):
        self.step = step

    def on_state(self, step, state, metrics):
        return jt.Stop("as it was told") if step == self.step else None


@pytest.mark.thorough
def test_the_same_bits_by_any_workers_and_resumed_by_others(home):
    plain = kept(trained(CONFIG, "name=plain"))
    for name, settings in {"threads": THREADS, "processes": PROCESSES}.items():
        assert kept(trained(CONFIG, f"name={name}", *settings)) == plain
    stopped = trained(CONFIG, "name=both", *PROCESSES, hooks=[StopAt(7)])
    assert stopped.step == 7
    on = trained(CONFIG, "name=both", *THREADS)
    assert "resumes from step 7 of 12" in on.directory.log.read_text()
    assert kept(on) == plain


@pytest.mark.thorough
def test_a_step_is_timed_with_the_workers(home):
    """Count durations in time by reading as the run will read."""
    assert trained(CONFIG, "name=timed", "steps=40 seconds", *THREADS, hooks=[StopAt(2)]).step == 2


@pytest.mark.thorough
def test_a_worker_that_dies_ends_the_run_in_words(home):
    study = Path("experiments/quick.py")
    study.write_text(study.read_text().replace("Own(train)", "Own(train, dies=150)"))
    with pytest.raises(
        PeerError, match=r"was ended by signal 9 \(SIGKILL\) before it sent the batch"
    ):
        trained(CONFIG, "name=dies", *PROCESSES)


def test_streams_are_refused_before_training(home):
    study = Path("experiments/quick.py")
    code = study.read_text().replace(
        "Shuffled(Own(train), size=self.batch, seed=self.seed)",
        "LoaderBatches(lambda: [train[np.arange(16)]], size=16)",
    )
    study.write_text(code.replace("import Arrays,", "import Arrays, LoaderBatches,"))
    with pytest.raises(DataError, match=r"streamed \(LoaderBatches\).* Set workers.count=0"):
        trained(CONFIG, "name=streams", *THREADS)


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_or_killed_leaves_no_worker_and_resumes(home):
    """Ctrl-C goes to the workers too, as on a terminal; they end with the run and not before it."""
    study = Path("experiments/quick.py")
    code = study.read_text()
    slow = code.replace(
        "        return self.source[ind", "        sleep(0.03)\n        return self.source[ind"
    )
    study.write_text(f"from time import sleep\n\n{slow}")
    settings = ("steps=120", "checkpoint.every=20", "evaluate.every=0")
    metrics, most = Path("runs/quick/metrics.jsonl"), 0
    command = [sys.executable, "-m", "jtrain", "run", CONFIG, *settings, *PROCESSES]
    for number in (signal.SIGKILL, signal.SIGINT):
        most += 25
        run = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            until = time.monotonic() + 300
            while run.poll() is None and _rows(metrics) < most and time.monotonic() < until:
                time.sleep(0.01)
            workers = descendants(run.pid) - {run.pid}
            assert len(workers) >= 2
            os.kill(run.pid, number) if number == signal.SIGKILL else os.killpg(run.pid, number)
            said = run.communicate(timeout=300)[1].decode()
        finally:
            run.kill()
        assert run.returncode == (75 if number == signal.SIGINT else -number), said
        until = time.monotonic() + 300
        while (left := [pid for pid in workers if _runs(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left
    study.write_text(code)
    on = kept(trained(CONFIG, *settings))
    assert on == kept(trained(CONFIG, "name=plain", *settings))


def _rows(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
