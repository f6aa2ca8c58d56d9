import counting
import pytest

from jtrain.errors import CheckpointError
from jtrain.train.hooks import SaveEvery, on_numbers


def test_a_state_is_saved_after_the_numbers_of_its_step_were_reported():
    order = []
    save = SaveEvery(every=3, save=lambda step, state: order.append((step, float(state))))
    ended = counting.run([on_numbers(lambda step, x: order.append(step)), save], stop=7)
    save.at(ended.step, ended.state)
    save.at(ended.step, ended.state)
    assert order == [1, 2, 3, (3, 3.0), 4, 5, 6, (6, 6.0), 7, (7, 7.0)]
    assert save.saved == 7


def test_a_save_that_fails_ends_the_run_loudly():
    def full(step, state):
        raise CheckpointError("no room")

    save = SaveEvery(every=3, save=full)
    with pytest.raises(CheckpointError, match="no room"):
        counting.run([save], stop=7)
    assert save.saved is None
