"""Functions as hooks, and the heartbeat of each step."""

import counting
import pytest

from jtrain.core.loop import Hook, Stop
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import ConfigError
from jtrain.train.hooks import EarlyStop, EvaluateEvery, on_numbers
from jtrain.train.hooks.evaluation import add_listeners
from jtrain.train.hooks.function_hooks import to_hook
from jtrain.train.hooks.signals import Signals


class Worst(Hook):
    worst = 0.0

    def on_numbers(self, step, numbers):
        self.worst = max(self.worst, numbers["loss"])


class Until(Hook):
    def on_state(self, step, state):
        return Stop("far enough", kind="finished") if state >= 6 else None


def test_hooks_of_five_lines_see_the_numbers_and_stop_the_loop():
    worst = Worst()
    ended = counting.run([worst, Until()], stop=20)
    assert worst.worst == 1.0
    assert (ended.step, ended.stop) == (6, Stop("far enough", kind="finished"))


def test_a_function_is_a_hook_by_the_names_of_what_it_takes():
    seen = []

    def told(step, numbers, where=seen):
        where.append(("numbers", step, numbers["loss"]))

    def kept(step, state):
        seen.append(("state", step, float(state)))

    def judged(step, results):
        seen.append(("results", step, results))
        return Stop("judged") if step == 2 else None

    evaluation = EvaluateEvery(every=2, measure=lambda s: {"loss": 7.0}, log=lambda *_: None)
    hooks = [to_hook(told), to_hook(kept), evaluation, to_hook(judged)]
    add_listeners({"valid": evaluation}, hooks)
    ended = counting.run(hooks, stop=9)
    assert (ended.step, ended.stop) == (2, Stop("judged"))
    assert sorted(seen, key=lambda x: x[:2]) == [
        ("numbers", 1, 1.0),
        ("numbers", 2, 0.5),
        ("results", 2, {"valid/loss": 7.0}),
        ("state", 1, 1.0),
        ("state", 2, 2.0),
    ]


def test_a_hook_is_unchanged_and_other_values_are_refused():
    hook = EarlyStop()
    assert to_hook(hook) is hook
    for wrong in (lambda step, loss: None, print, Worst):
        with pytest.raises(ConfigError, match=r"is no hook: .* \(step, numbers\)"):
            to_hook(wrong)


class Misspelt(Hook):
    def on_number(self, step, numbers): ...


def test_a_method_that_is_never_called_is_refused():
    with pytest.raises(ConfigError, match=r"on_number is never called; .*did you mean on_numbers"):
        to_hook(Misspelt())
    with pytest.raises(ConfigError, match=r"it has no method.* Write def on_numbers\(self"):
        to_hook(Hook())
    for hook in (Worst(), Until(), EarlyStop()):
        assert to_hook(hook) is hook


def test_an_answer_that_is_no_stop_is_refused():
    with pytest.raises(ConfigError, match=r'return jt\.Stop\("why"\), and otherwise None'):
        counting.run([on_numbers(lambda *_: True)], stop=3)


def test_a_wait_for_data_is_reported_and_the_phase_after_it():
    waited = []

    def batches():
        for _ in range(3):
            waited.append(HEARTBEAT.now().phase)
            yield {}

    went_on = [HEARTBEAT.now().phase for _ in Signals().through(batches(), "eval")]
    assert waited == ["data"] * 3
    assert went_on == ["eval"] * 3
