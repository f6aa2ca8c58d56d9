"""First steps with other values: the rows go on, the rate follows, a kill costs nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from comparison import assert_close
from quick_study import At, PowerCutError, config_of, cut, kept, trained

from jtrain.config.durations import DurationUnits, convert_durations
from jtrain.core.placement import Unplaced
from jtrain.data import Shuffled
from jtrain.errors import ConfigError, UserError
from jtrain.inspect.debug.audit import audit
from jtrain.train.program import set_up
from jtrain.train.stages import count_stages

CONFIG = "configs/quick.yaml"
# Batches of 4, 8 and 16 rows. Three steps of 4 end within a batch of 8, and then one of 8 in one of
# 16: both stages are a step longer.
STAGES = "stages=[{until: 3, set: {batch: 4}}, {until: 5, set: {batch: 8}}]"
STOPS, SIZES = (4, 6), (4, 8, 16)
RUN = (STAGES, "steps=9", "checkpoint.every=4", "evaluate.every=0")
SHAKESPEARE = str(Path(__file__).parents[2] / "configs" / "shakespeare.yaml")
LANGUAGE = (
    *("batch=8", "data.context=16", "model.context=16", "model.layers=1", "model.width=16"),
    *("model.heads=2", "parallel.kind=single", "log.every=1", "evaluate.batch=512"),
)


def losses(outcome):
    """Return the loss of each step."""
    rows = map(json.loads, outcome.directory.metrics.read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def rows_of_steps(source, count):
    """Return the rows of each step, of batches that follow one another in the order of an epoch."""
    order = [Shuffled(source, size=1).indices(i)[0] for i in range(200)]
    found, at = [], 0
    for step in range(count):
        size = SIZES[sum(step >= stop for stop in STOPS)]
        found.append(order[at : at + size])
        at += size
    return found


@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize(
    "layout",
    [
        (),
        pytest.param(
            ("parallel={kind: mirrored, devices: 4}", "microbatches=2"), marks=pytest.mark.thorough
        ),
        pytest.param(
            ("parallel={kind: fsdp, devices: 2}", "microbatches=4"), marks=pytest.mark.thorough
        ),
    ],
)
def test_the_steps_are_those_of_a_loop_by_hand(layout):
    config = config_of(CONFIG, ["model.drop=0", *RUN])
    study = config.build(Unplaced())
    params, _ = study.init(jax.random.split(jax.random.key(config.seed))[0])
    state = study.optimizer.init(params)

    def loss(params, batch):
        mean, _ = study.loss(params, batch, None)
        return mean.total / mean.weight

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = study.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    expected = []
    for rows in rows_of_steps(study.train.source, 9):
        batch = {**study.train.source[np.array(rows)], "mask": np.ones(len(rows), bool)}
        batch = jax.tree.map(jax.numpy.asarray, batch)
        params, state, value = step(params, state, batch)
        expected.append(float(value))
    outcome = trained(CONFIG, "model.drop=0", *RUN, *layout)
    assert_close(losses(outcome), expected, 1e-5)


@pytest.mark.usefixtures("study_home")
def test_cut_in_a_stage_it_comes_to_the_same_bits(unbroken):
    with pytest.raises(PowerCutError):
        trained(CONFIG, *RUN, hooks=[At(5, cut)])
    assert kept(trained(CONFIG, *RUN)) == unbroken(*RUN)


KILLED = """
import os, signal, sys
import jtrain as jt

class Kill(jt.Hook):
    every = int(sys.argv[1])
    def on_state(self, step, state):
        os.kill(os.getpid(), signal.SIGKILL)

jt.run(jt.resolve("configs/quick.yaml", sys.argv[2:]).config, hooks=[Kill()])
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_killed_at_a_change_it_comes_to_the_same_bits(unbroken):
    for step in (4, 5, 7):  # the last of a stage, the first of one, within one
        command = [sys.executable, "-c", KILLED, str(step), *RUN]
        ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert ended.returncode == -signal.SIGKILL
    assert kept(trained(CONFIG, *RUN)) == unbroken(*RUN)


SMALLER = "stages=[{until: 2, set: {batch: 32}}, {until: 4, set: {batch: 8}}]"


@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize(
    ("stages", "without", "numbers", "skipped"),
    [
        (STAGES, "[[1, 2], [4, 5]]", [0, 2, 3, 5, 6], [*range(4, 8), *range(16, 20)]),
        (STAGES, "[[4, 6]]", [0, 1, 2, 3, 6], range(16, 32)),
        (SMALLER, "[[1, 2]]", [0, 2, 3, 4, 5], range(32, 64)),
    ],
)
def test_skipped_batches_are_skipped_by_their_rows_and_no_row_comes_twice(
    stages, without, numbers, skipped
):
    config = config_of(CONFIG, [*RUN[1:], stages, "steps=7", f"guard.without={without}"])
    resolved = set_up(config).resolved
    train, rows = resolved.train(), resolved.experiment.train.source
    assert [train.number(step) for step in range(5)] == numbers
    seen = []
    for step in range(7):
        found = resolved.train(own_rows=False).indices(step)
        assert (rows[found]["x"] == train[step]["x"]).all()
        seen += found.tolist()
    assert len(set(seen)) == len(seen)
    order = [Shuffled(rows, size=1).indices(i)[0] for i in range(200)]
    assert not {order[i] for i in skipped} & {*seen}


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_other_values_of_the_loss_hold_in_their_stage_alone():
    plain = trained(CONFIG, "steps=6", "name=plain", "model.drop=0.5")
    staged = trained(CONFIG, "steps=6", "stages=[{until: 3, set: {model.drop: 0.5}}]")
    assert losses(plain)[:3] == losses(staged)[:3]
    assert losses(plain)[4:] != losses(staged)[4:]


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_steps_of_every_stage_are_audited():
    outcome = trained(CONFIG, *RUN)
    directory = outcome.directory
    options = {"steps": 9, "seed": 0, "tolerance": None, "log": lambda line: None}
    found = audit(config_of(directory.config), directory.path, **options)
    assert found.passed
    assert len(found.steps) == 9


UNITS = DurationUnits(batch=16, tokens=64, epoch=512)
TOKENS = """stages=[{until: 2048 tokens, set: {batch: 4, data.context: 32}, lr: sqrt},
    {until: 22, set: {batch: 8}, lr: linear}]"""


def test_lengths_and_rates_are_counted_through_the_stages():
    warmup = "optimizer.schedule={kind: cosine, warmup: 2560 tokens}"
    config = config_of(SHAKESPEARE, ["steps=20480 tokens", warmup, TOKENS])
    sizes = [UNITS._replace(batch=4, tokens=32), UNITS._replace(batch=8), UNITS]
    starts = count_stages(config.stages, sizes)
    assert (starts.stops, starts.batches) == ((16, 22), (0, 4, 5))
    earlier = tuple(zip(starts.stops, sizes, strict=False))
    counted = convert_durations(config, UNITS._replace(earlier=earlier))
    # 16 steps of 128 tokens, 6 of 512, and the rest of 1,024; the warmup ends with one of 512.
    assert (counted.steps, counted.optimizer.schedule.warmup) == (16 + 6 + 15, 16 + 1)
    assert starts.total(23, [4, 8, 16]) == 4 * 16 + 8 * 6 + 16
    pieces = "{kind: join, pieces: [{steps: 2}, {steps: 1M tokens}, {}]}"
    joined = config_of(SHAKESPEARE, ["steps=99", f"optimizer.schedule={pieces}", TOKENS])
    with pytest.raises(ConfigError, match=r"pieces.1.steps: 1M tokens .* Write it in steps"):
        convert_durations(joined, UNITS._replace(earlier=earlier))
    factor = starts.lr_factor(config.stages)
    found = [float(factor(step)) for step in (0, 15, 16, 21, 22)]
    assert_close(found, [8**-0.5, 8**-0.5, 0.5, 0.5, 1.0], 1e-6)


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_shorter_context_and_window_train_a_language_model():
    """Each stage is a program; the tokens of all are counted."""
    stages = "stages=[{until: 64 tokens, set: {batch: 4, data.context: 8}, lr: 0.5}]"
    outcome = trained(SHAKESPEARE, *LANGUAGE, "steps=320 tokens", stages)
    assert outcome.step == 2 + 2  # 2 steps of 32 tokens, 2 of 128
    log = outcome.directory.log.read_text()
    assert "to step 2: batch=4, data.context=8, microbatches=1, learning rate x 0.5" in log
    windowed = trained(SHAKESPEARE, *LANGUAGE, "steps=3", "name=w", "model.window=4")
    short = "stages=[{until: 2, set: {model.window: 4}}]"
    staged = trained(SHAKESPEARE, *LANGUAGE, "steps=3", "name=s", short)
    assert losses(windowed)[:2] == losses(staged)[:2]
    assert losses(windowed)[2] != losses(staged)[2]


@pytest.mark.thorough
@pytest.mark.usefixtures("study_home")
def test_a_resume_whose_calls_would_move_an_end_is_refused():
    settings = (STAGES.replace("until: 5", "until: 6"), *RUN[1:], "steps=12")
    with pytest.raises(PowerCutError):
        trained(CONFIG, *settings, hooks=[At(5, cut)])
    with pytest.raises(ConfigError, match=r"step 6 .* step 8 here, as steps_per_call is 4"):
        trained(CONFIG, *settings, "steps_per_call=4")


@pytest.mark.usefixtures("study_home")
@pytest.mark.parametrize(
    ("stages", "more", "said"),
    [
        ("{until: 3, set: {bach: 4}}", [], "batch"),
        ("{until: 3, set: {batch: four}}", [], "batch"),
        ("{until: 3, set: {batch.rows: 4}}", [], "batch is a value"),
        ("{until: 3, set: {seed: 4}}", [], "seed"),
        ("{until: 3, set: {model.width: 4}}", [], "bias is float32"),
        ("{until: 3, set: {batch: 4}}, {until: 2, set: {batch: 8}}", [], "stages.1.until"),
        ("{until: 1 minute, set: {batch: 4}}", [], "stages"),
        ("{until: 3, set: {batch: 4}, lr: sqrt}", [], "optimizer=self.optimizer"),
        ("{until: 3, set: {batch: 6}}", ["parallel={kind: mirrored, devices: 4}"], "stages.0.set"),
        ("{until: 3 tokens, set: {batch: 4}}", [], "stages.0.until"),
        ("{until: 3, set: {data.rows: 0}}", [], "stages.0"),
        ("{until: 3, set: {batch: 4, microbatches: 3}}", [], "microbatches"),
        ("{until: 3, set: {batch: 4}}", ["parallel.kind=server"], "parallel.kind=server"),
    ],
)
def test_what_a_stage_cannot_have_is_said(stages, more, said):
    with pytest.raises(UserError, match=said):
        set_up(config_of(CONFIG, [f"stages=[{stages}]", *more]))
