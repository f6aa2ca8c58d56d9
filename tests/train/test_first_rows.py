"""What is traced of a batch reads it once: a batch of images takes a second to decode."""

import numpy as np

import jtrain as jt
from jtrain.data import Arrays

SIZE, STEPS = 8, 4


class Counted(Arrays):
    """Rows that count how many of them were read."""

    def __init__(self, rows: int):
        draw = np.random.default_rng(0)
        super().__init__(x=draw.normal(size=(rows, 2)).astype("f"), y=np.zeros(rows, "f"))
        self.read = 0

    def __getitem__(self, indices):
        self.read += len(indices)
        return super().__getitem__(indices)


def loss(params, batch, rng):
    return jt.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


def test_a_run_reads_one_batch_more_than_it_trains_on_and_three_before_it_evaluates():
    train, valid = Counted(64), Counted(SIZE)
    given = {"steps": STEPS, "batch": SIZE, "steps_per_call": 1, "valid": valid, "quiet": True}
    jt.fit(loss, {"w": np.ones(2, "f")}, train, valid_every=1, **given)
    assert train.read == (STEPS + 1) * SIZE
    assert valid.read == (STEPS + 3) * SIZE
