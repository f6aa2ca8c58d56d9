"""Modes async and ssp: each batch once, and the steps of one device where nothing is stale."""

import pytest
from comparison import distance
from quick_study import CODE, write_study
from server_runs import Losses, server_setup, train_on_one_device, train_on_servers

pytestmark = pytest.mark.thorough
SGD = "optimizer={kind: sgd, lr: 0.1, clip: 0.5}"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def test_one_worker_takes_the_steps_of_one_device(study):
    want, got = Losses(), Losses()
    one = train_on_one_device(study, SGD, "steps=6", hooks=[want])
    setup = server_setup(study, "{kind: async}", SGD, "steps=6", workers=1, shards=3)
    served = train_on_servers(setup, hooks=[got])
    assert distance(served.state.params, one.state.params) <= 1e-6
    for (_, ours), (_, theirs) in zip(got.numbers, want.numbers, strict=True):
        assert ours.pop("staleness") == 0
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6), name


@pytest.mark.parametrize(
    "mode",
    [
        "{kind: ssp, bound: 1}",
        "{kind: async, staleness: {kind: compensate}}",
    ],
)
def test_several_workers_take_each_step_once_and_learn(study, mode):
    got = Losses()
    setup = server_setup(study, mode, SGD, "steps=60", "evaluate.every=0", workers=3, shards=2)
    served = train_on_servers(setup, hooks=[got])
    assert [step for step, _ in got.numbers] == list(range(1, 61))
    assert int(served.state.step) == 60
    one = train_on_one_device(study, SGD, "steps=60", "evaluate.every=0")
    assert setup.measure(served.state)["loss"] < 1.1 * setup.measure(one.state)["loss"]
    if "ssp" in mode:
        assert max(numbers["staleness"] for _, numbers in got.numbers) <= 3 * 2


CARRIED = CODE.replace("def loss(params, batch, rng)", "def loss(params, extra, batch, rng)")
CARRIED = CARRIED.replace(
    """            return cross_entropy(x @ params["down"], batch["label"], batch["mask"])""",
    """            mean, metrics = cross_entropy(x @ params["down"], batch["label"], batch["mask"])
            mask = batch["mask"][:, None]
            seen = jnp.where(mask, extra["mean"][None] / 2 + batch["x"] / 2, 0)
            new = jt.Mean(seen.sum(0), batch["mask"].sum(dtype=jnp.float32))
            return mean, metrics, {"mean": new}""",
).replace("return params, ()", 'return params, {"mean": jnp.zeros(2)}')
CARRIED = CARRIED.replace("loss=loss", "loss=jt.stateful(loss)")


def test_carried_state_is_that_of_the_gradient_reported_last(tmp_path):
    study = write_study(tmp_path, CARRIED)
    one = train_on_one_device(study, SGD, "steps=6")
    setup = server_setup(study, "{kind: async}", SGD, "steps=6", workers=1, shards=2)
    assert distance(train_on_servers(setup).state.extra, one.state.extra) <= 1e-6
    setup = server_setup(study, "{kind: async}", SGD, "steps=6", workers=3, shards=2)
    served = train_on_servers(setup).state.extra["mean"]
    # A mean of the means of batches: whose they are depends on who was last.
    rows = setup.experiment.train
    means = [rows[step]["x"].mean(0) for step in range(6)]
    lowest, highest = min(map(min, means)), max(map(max, means))
    assert min(lowest, 0) <= served.min() <= served.max() <= max(highest, 0)
    assert abs(served).max() > 0
