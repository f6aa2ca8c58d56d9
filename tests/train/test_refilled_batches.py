"""A reader may fill the same buffer for each batch: steps that still run keep their own rows."""

import jax
import numpy as np
import optax
import pytest

import jtrain as jt
from jtrain.config.top import CheckpointConfig
from jtrain.core.loop import train_loop
from jtrain.data.batches.aligned import aligned_copy
from jtrain.optim.adam import AdamW
from jtrain.parallel import Mirrored, Single
from jtrain.train.setup import set_up

STEPS, ROWS, WIDTH = 12, 512, 128  # 256 KB a batch, which another thread would copy


class Refilled:
    """Batches in new arrays, or all in one buffer."""

    size, ragged = ROWS, False
    buffer: np.ndarray | None = None

    def __getitem__(self, step):
        values = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
        if self.buffer is not None:
            self.buffer[:] = values
            values = self.buffer
        row = np.arange(ROWS, dtype=np.int32)
        return {"x": values, "row": row, "mask": np.ones(ROWS, bool)}

    def shard(self, index, count):
        return self


def buffer(offset: int) -> np.ndarray:
    """Return memory that begins so many bytes behind a multiple of 64."""
    memory = aligned_copy(np.zeros(ROWS * WIDTH * 4 + 64, np.uint8))
    return memory[offset : offset + ROWS * WIDTH * 4].view(np.float32).reshape(ROWS, WIDTH)


@jt.configclass
class Config(jt.RunConfig):
    """A layer whose loss reads its rows late: after products that take longer than reading."""

    def build(self, place):
        def loss(params, batch, rng):
            body = lambda wide, _: (jax.numpy.tanh(wide @ params), None)
            wide, _ = jax.lax.scan(body, params, length=40)
            values = ((batch["x"] @ wide) ** 2).mean(1)
            return jt.Mean.of(values, batch["mask"])

        init = lambda key: (jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, ())
        return jt.Experiment(init=init, loss=loss, train=Refilled(), optimizer=optax.sgd(0.1))


@pytest.mark.parametrize(
    "parallel",
    [Single(), pytest.param(Mirrored(devices=2), marks=pytest.mark.thorough)],
    ids=["single", "mirrored"],
)
def test_a_reader_may_fill_one_buffer_again(parallel):
    """XLA:CPU computes with memory that begins at a multiple of 64, and copies other memory."""
    config = Config(
        experiment="refilled",
        name="refilled",
        steps=STEPS,
        batch=ROWS,
        optimizer=AdamW(lr=1e-3),
        parallel=parallel,
        checkpoint=CheckpointConfig(every=0),
        steps_per_call=1,
    )
    setup = set_up(config)
    step, batches = setup.compile_step(), setup.experiment.train
    assert isinstance(batches, Refilled)

    def train(memory: np.ndarray | None) -> np.ndarray:
        batches.buffer = memory
        with setup.read_ahead(0) as feed:
            return np.asarray(
                train_loop(step, setup.fresh(), feed, start=0, stop=STEPS).state.params
            )

    expected = train(None)
    for offset in (0, 16):
        assert np.array_equal(train(buffer(offset)), expected), f"offset {offset}"
