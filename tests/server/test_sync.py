"""Mode sync takes the steps of one device, however many workers and shards there are."""

import pytest
from comparison import distance
from quick_study import write_study
from server_runs import Losses, server_setup, train_on_one_device, train_on_servers

SGD = "optimizer={kind: sgd, lr: 0.3, momentum: 0.9, clip: 0.5}"
ADAM = "optimizer={kind: adamw, lr: 3e-2, schedule: {kind: cosine}}"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


THOROUGH = pytest.mark.thorough
OTHERS = [pytest.param(*each, marks=THOROUGH) for each in [(1, 1), (1, 3), (2, 1), (4, 1), (4, 3)]]


@pytest.mark.parametrize(("workers", "shards"), [(2, 3), *OTHERS])
def test_takes_the_step_of_one_device(study, workers, shards):
    want, got = Losses(), Losses()
    one = train_on_one_device(study, SGD, "steps=2", hooks=[want])
    setup = server_setup(study, "{kind: sync}", SGD, "steps=2", workers=workers, shards=shards)
    served = train_on_servers(setup, hooks=[got])
    assert distance(served.state.params, one.state.params) <= 1e-6
    assert distance(served.state.opt_state, one.state.opt_state) <= 1e-6
    for (step, ours), (other, theirs) in zip(got.numbers, want.numbers, strict=True):
        assert step == other
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6), name


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(SGD, marks=THOROUGH), pytest.param(ADAM, marks=pytest.mark.slow)],
)
def test_is_with_one_device_after_a_hundred_steps(study, optimizer):
    one = train_on_one_device(study, optimizer, "steps=100")
    setup = server_setup(study, "{kind: sync}", optimizer, "steps=100", workers=4, shards=3)
    served = train_on_servers(setup)
    assert distance(served.state.params, one.state.params) <= 1e-4
