"""`jtrain eval --watch` beside processes that train, and in several processes of its own."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_study import CODE, at_home, trained, write_study
from watched_run import KEEP_ALL, rows, set_status

from jtrain.train.watched_checkpoints import PINS

LONG = ("steps=600", "checkpoint.every=40", "evaluate.every=0", "log.every=40")


# Each batch waits while there is a file of this name, so that the run does not end meanwhile.
SLOW = CODE.replace("    return Arrays(", "    return Slow(").replace(
    "\n\n@jt.configclass\nclass Data",
    """

class Slow(Arrays):
    def __getitem__(self, indices):
        time.sleep(0.04 if os.path.exists("slow") else 0)
        return super().__getitem__(indices)


@jt.configclass
class Data""",
)


@pytest.fixture
def study(tmp_path: Path, monkeypatch) -> Path:
    write_study(tmp_path, f"import os\nimport time\n{SLOW}")
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    return tmp_path


def start(*words: str, out: str) -> subprocess.Popen:
    with open(out, "a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "jtrain", *words], stdout=file, stderr=subprocess.STDOUT
        )


def ends(process: subprocess.Popen, out: str, code: int = 0) -> None:
    assert process.wait(timeout=400) == code, Path(out).read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [(), ("parallel={kind: server, workers: 2}",)])
def test_a_watch_beside_a_training_process(study: Path, settings):
    """It starts first; retention removes checkpoints; both die once and are started again."""
    run, words = Path("runs/quick"), ("eval", "quick", "--watch", "--json")
    train = ("run", "configs/quick.yaml", *LONG, "checkpoint.keep=2", *settings)
    Path("slow").touch()
    watcher, trainer = start(*words, out="watch.txt"), start(*train, out="train.txt")
    end = time.monotonic() + 400
    while len(rows(run)) < 2:
        assert trainer.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    Path("slow").unlink()
    trainer.kill()
    trainer.wait()
    watcher.kill()
    watcher.wait()
    watcher, trainer = start(*words, out="watch.txt"), start(*train, out="train.txt")
    ends(trainer, "train.txt")
    ends(watcher, "watch.txt")
    steps = [row["step"] for row in rows(run)]
    assert len(set(steps)) == len(steps) >= 3, "none twice"
    assert steps[-1] == 600, "the last one"
    assert not (run / PINS).exists()
    printed = [json.loads(x) for x in Path("watch.txt").read_text().splitlines() if x[:1] == "{"]
    assert [row["step"] for row in printed][-1] == 600


@pytest.mark.thorough
def test_several_processes_watch_and_sigterm_ends_them(study: Path):
    run = Path("runs/quick")
    trained("configs/quick.yaml", *KEEP_ALL)
    set_status(run, "running")
    words = ("launch", "--processes", "2", "--devices", "2", "eval", "quick", "--watch")
    layout_of_both = "parallel={kind: mirrored, devices: 2}"
    watcher = start(*words, layout_of_both, out="watch.txt")
    end = time.monotonic() + 400
    while len(rows(run)) < 3 and time.monotonic() < end and watcher.poll() is None:
        time.sleep(0.05)
    watcher.send_signal(signal.SIGTERM)
    ends(watcher, "watch.txt", 75)
    assert [row["step"] for row in rows(run)] == [4, 8, 12]
    set_status(run, "done")
    watcher = start(*words, layout_of_both, out="watch.txt")
    ends(watcher, "watch.txt")
    assert [row["step"] for row in rows(run)] == [4, 8, 12]
