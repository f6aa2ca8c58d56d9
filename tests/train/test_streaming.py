"""A killed run over a stream resumes to the same bits, and reads from where it was."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_study import CODE, at_home, kept, trained, write_study

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.errors import DataError

CONFIG = "configs/quick.yaml"
STREAMED = "train=Streamed(Points, lambda point: point, size=self.batch, every=10)"
STREAM = '''
import os
import time

from jtrain.data import Streamed
from jtrain.errors import DataError

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
        if os.path.exists("changed"):
            raise DataError("the stream is another")
        self.draw.bit_generator.state = state
'''


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    code = CODE.replace("train=Shuffled(train, size=self.batch, seed=self.seed)", STREAMED)
    assert STREAMED in code
    write_study(tmp_path, code + STREAM)
    at_home(tmp_path, monkeypatch, compiled)


def drawn() -> int:
    return os.stat("drawn").st_size


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [pytest.param((), marks=pytest.mark.slow), ("steps_per_call=4",)]
)
def test_killed_over_a_stream_it_resumes_to_the_same_bits(settings: tuple[str, ...]):
    settings = ("steps=120", "checkpoint.every=20", "evaluate.every=60", *settings)
    whole = trained(CONFIG, *settings, "name=whole")
    before = drawn()
    assert before > 120 * 16
    checkpoints = Path("runs/killed/checkpoints")
    command = [sys.executable, "-m", "jtrain", "run", CONFIG, *settings, "name=killed"]
    held = {**os.environ, "HELD_BY": str(checkpoints / "60")}
    run = subprocess.Popen(command, env=held, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 300
        while run.poll() is None and not (checkpoints / "60").exists():
            assert time.monotonic() < end, "step 60 was never saved"
            time.sleep(0.002)
        run.kill()
        told = run.communicate(timeout=300)[1].decode()
    finally:
        run.kill()
    assert run.returncode == -9, told

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


@pytest.mark.thorough
def test_a_stream_that_is_another_is_refused_before_anything_is_trained():
    pause = lambda step, state: jt.Stop("a pause") if step == 5 else None
    outcome = trained(CONFIG, hooks=[pause])
    Path("changed").touch()
    metrics = outcome.directory.metrics.read_bytes()
    with pytest.raises(DataError, match="the stream is another"):
        trained(CONFIG)
    assert outcome.directory.metrics.read_bytes() == metrics
    Path("changed").unlink()
    assert trained(CONFIG).status == "done"
