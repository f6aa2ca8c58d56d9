"""The data of a run: read by any workers, from a stream, or into one buffer, to the same bits."""

import json
import os
from pathlib import Path

import pytest
from plain_environ import run_and_kill
from quick_study import CODE, At, kept, trained

import jtrain as jt
from jtrain.checkpoint import CheckpointManager

CONFIG = "configs/quick.yaml"

OWN = '''

class Own:
    """A source of the experiment's own, as a worker process has to find it."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, indices):
        return self.source[indices]
'''

THREADS = ("workers.count=3", "workers.ahead=1")
PROCESSES = ("workers.count=2", "workers.kind=processes")


@pytest.fixture
def home(study_home: Path) -> None:
    code = CODE.replace("Shuffled(train,", "Shuffled(Own(train),") + OWN
    Path("experiments/quick.py").write_text(code)


@pytest.mark.thorough
def test_the_same_bits_by_any_workers_and_resumed_by_others(home):
    plain = kept(trained(CONFIG, "name=plain"))
    for name, settings in {"threads": THREADS, "processes": PROCESSES}.items():
        assert kept(trained(CONFIG, f"name={name}", *settings)) == plain
    stopped = trained(CONFIG, "name=both", *PROCESSES, hooks=[At(7, lambda: jt.Stop("enough"))])
    assert stopped.step == 7
    on = trained(CONFIG, "name=both", *THREADS)
    assert "resumes from step 7 of 12" in on.directory.log.read_text()
    assert kept(on) == plain


STREAMED = "train=Streamed(Points, lambda point: point, size=self.batch, every=10)"

STREAM = '''
import os
import time

from jtrain.data import Streamed

COUNT = os.open("drawn", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Points:
    """Points without an end, which take their time; a byte in a file for each.

    They are held while the path HELD_BY exists, so that a kill finds the run there.
    """

    def __init__(self):
        self.draw = np.random.Generator(np.random.PCG64(7))

    def next(self):
        os.write(COUNT, b".")
        time.sleep(2e-4)
        while os.path.exists(os.environ.get("HELD_BY", "")):
            time.sleep(0.01)
        x = self.draw.normal(size=2).astype(np.float32)
        return {"x": x, "label": np.int32(x[0] > x[1])}

    def state(self):
        return self.draw.bit_generator.state

    def restore(self, state):
        self.draw.bit_generator.state = state
'''


def drawn() -> int:
    return os.stat("drawn").st_size


@pytest.mark.thorough
def test_killed_over_a_stream_it_resumes_to_the_same_bits(study_home: Path):
    code = CODE.replace("train=Shuffled(train, size=self.batch, seed=self.seed)", STREAMED)
    assert STREAMED in code
    Path("experiments/quick.py").write_text(code + STREAM)
    settings = ("steps=120", "checkpoint.every=20", "evaluate.every=60", "steps_per_call=4")
    whole = trained(CONFIG, *settings, "name=whole")
    before = drawn()
    assert before > 120 * 16
    checkpoints = Path("runs/killed/checkpoints")
    last = checkpoints / "60"
    run_and_kill(last.exists, CONFIG, *settings, "name=killed", HELD_BY=str(last))
    saved = CheckpointManager(checkpoints).newest()
    assert saved is not None
    assert 60 <= saved < 120
    place = json.loads((checkpoints / str(saved) / "about.json").read_text())
    assert saved - 10 < place["about"]["batches"]["step"] <= saved, "of the step, not beyond it"
    before = drawn()
    again = trained(CONFIG, *settings, "name=killed")
    assert again.status == "done"
    # What is left, the places between two that are kept, and a batch for each look at the shapes.
    assert drawn() - before <= (120 - saved + 10 + 5 * 8) * 16 < 120 * 16
    assert kept(again) == kept(whole)
