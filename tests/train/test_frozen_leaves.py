"""Leaves that are frozen."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close, assert_leaves_close, bitwise
from quick_study import CODE, config_of, trained

import jtrain as jt
from jtrain.train.hooks.step_record import read_step_records
from jtrain.train.program import set_up
from jtrain.train.summary import count_step_flops

CONFIG = "configs/quick.yaml"
BUILT = "optimizer=self.optimizer.build(self.steps)"
FREEZE = "optimizer.groups=[{match: up, freeze: true}, {match: bias, freeze: true}]"
ROW = {"up": 2 * 2 * 8, "down": 2 * 8 * 3}  # FLOPs of a product and a row


@pytest.fixture
def frozen_home(study_home: Path):
    """Work where the study hands its optimizer on, so that a run knows what is frozen."""
    Path("experiments/quick.py").write_text(CODE.replace(BUILT, "optimizer=self.optimizer"))


@pytest.mark.usefixtures("frozen_home")
def test_no_product_is_computed_for_what_depends_on_frozen_leaves_alone():
    whole, part = (count_step_flops(set_up(config_of(CONFIG, some))) for some in ([], [FREEZE]))
    # Forward, and by each kernel; the derivative by what goes into `down` is for `up`.
    assert whole.model == 16 * (2 * ROW["up"] + 3 * ROW["down"])
    assert part.model == part.hardware == 16 * (ROW["up"] + 2 * ROW["down"])


@pytest.mark.thorough
@pytest.mark.usefixtures("frozen_home")
def test_devices_send_no_gradient_of_frozen_leaves():
    impl = "shard_map"

    def sent(*settings: str) -> str:
        layout = f"parallel={{kind: mirrored, impl: {impl}, devices: 2}}"
        program = set_up(config_of(CONFIG, [layout, *settings])).lower_step().compile().as_text()
        return " ".join(re.findall(r"= (.*?) all-reduce(?:-start)?\(", program))

    shape = r"f32\[(2,8|8,2)\]"  # of `up`, the only leaf that has it
    assert re.search(shape, sent())
    assert not re.search(shape, sent(FREEZE))


@pytest.mark.thorough
@pytest.mark.usefixtures("frozen_home")
def test_the_others_train_as_where_the_gradients_are_computed_and_dropped():
    part = jt.load(trained(CONFIG, FREEZE).directory.path)
    Path("experiments/whole.py").write_text(CODE)  # builds the transformation by itself
    whole = jt.load(trained(CONFIG, FREEZE, "experiment=whole", "name=whole").directory.path)
    start = set_up(config_of(CONFIG)).initial_state().params
    assert bitwise(part.params["up"], start["up"])
    assert bitwise(part.params["bias"], start["bias"])
    assert not np.array_equal(part.params["down"], start["down"])
    assert_leaves_close(part.params, jax.device_get(whole.params), 1e-5)
    files = (Path(f"runs/{name}/steps.jsonl") for name in ("quick", "whole"))
    ours, theirs = map(read_step_records, files)
    assert len(ours) == len(theirs) == 12
    for step, row in ours.items():
        assert_close(row.loss, theirs[step].loss, 1e-5)
        assert row.grad_norm < theirs[step].grad_norm  # over the leaves that are trained
