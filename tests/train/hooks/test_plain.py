import counting
import pytest

from jtrain.core.loop import Hook, Stop
from jtrain.errors import ConfigError
from jtrain.train.hooks import EarlyStop, EvaluateEvery, on_numbers, on_state
from jtrain.train.hooks.evaluation import add_listeners
from jtrain.train.hooks.function_hooks import to_hook


class Worst(Hook):
    worst = 0.0

    def on_numbers(self, step, numbers):
        self.worst = max(self.worst, numbers["loss"])


class Until(Hook):
    def on_state(self, step, state, metrics):
        return Stop("far enough", kind="finished") if state >= 6 else None


def test_hooks_of_five_lines_see_the_numbers_and_stop_the_loop():
    worst = Worst()
    ended = counting.run([worst, Until()], stop=20)
    assert worst.worst == 1.0
    assert (ended.step, ended.stop) == (6, Stop("far enough", kind="finished"))


def test_a_function_sees_the_numbers_of_its_steps_once_each_in_order():
    seen = []
    counting.run([on_numbers(lambda step, x: seen.append((step, x["loss"])), every=4)], stop=20)
    assert seen == [(4, 0.25), (8, 0.125), (12, seen[2][1]), (16, 0.0625), (20, seen[4][1])]


def test_a_function_sees_the_state_of_its_steps_and_may_stop():
    seen = []

    def look(step, state):
        seen.append((step, float(state)))
        return Stop("seen") if step == 6 else None

    assert counting.run([on_state(look, every=3)], stop=20).step == 6
    assert seen == [(3, 3.0), (6, 6.0)]


def test_a_hook_is_called_at_its_cadence_only():
    calls = {"numbers": 0, "state": 0}

    def count(name):
        calls[name] += 1

    hooks = [
        on_numbers(lambda step, x: count("numbers"), every=50),
        on_state(lambda step, x: count("state"), every=100),
    ]
    counting.run(hooks, stop=1000)
    assert calls == {"numbers": 20, "state": 10}


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


def test_a_function_of_states_sees_whole_calls():
    assert to_hook(lambda step, state: None, steps_per_call=5).every == 5


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


@pytest.mark.parametrize("hook", [on_numbers(lambda *_: True), on_state(lambda *_: 0.5)])
def test_an_answer_that_is_no_stop_is_refused(hook: Hook):
    with pytest.raises(ConfigError, match=r'return jt\.Stop\("why"\), and otherwise None'):
        counting.run([hook], stop=3)


def test_early_stop_says_that_the_metric_is_nan():
    results = {step: {"loss": 1.0 if step < 3 else float("nan")} for step in range(1, 8)}
    stop = EarlyStop("loss", patience=4).on_results(7, "valid", results)
    assert stop is not None
    assert "; it was NaN in 5 of them: lower the learning rate" in stop.why
