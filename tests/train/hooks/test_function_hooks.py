"""Functions as hooks, evaluations at their cadence, and the early stop."""

import math

import counting
import pytest

from jtrain.core.loop import Hook, Stop
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import ConfigError
from jtrain.train.hooks import EarlyStop, EvaluateEvery, EvaluationResult, on_numbers
from jtrain.train.hooks.evaluation import add_listeners
from jtrain.train.hooks.function_hooks import on_results, to_hook
from jtrain.train.hooks.signals import Signals


class Worst(Hook):
    worst = 0.0

    def on_numbers(self, step, numbers):
        self.worst = max(self.worst, numbers["loss"])


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
        with pytest.raises(ConfigError, match=r"is not a hook: .* \(step, numbers\)"):
            to_hook(wrong)


class Misspelt(Hook):
    def on_number(self, step, numbers): ...


def test_a_method_that_is_never_called_is_refused():
    with pytest.raises(ConfigError, match=r"on_number is never called; .*did you mean on_numbers"):
        to_hook(Misspelt())
    with pytest.raises(ConfigError, match=r"it has no method.* Write def on_numbers\(self"):
        to_hook(Hook())
    for hook in (Worst(), EarlyStop()):
        assert to_hook(hook) is hook


def test_a_wait_for_data_is_reported_and_the_phase_after_it():
    waited = []

    def batches():
        for _ in range(3):
            waited.append(HEARTBEAT.now().phase)
            yield {}

    went_on = [HEARTBEAT.now().phase for _ in Signals().through(batches(), "eval")]
    assert waited == ["data"] * 3
    assert went_on == ["eval"] * 3


def stops_at(losses, stop, name="valid", metric="loss"):
    """Return the evaluation, from 1, that ends the run, and the reason; None if it never ends."""
    for n in range(1, len(losses) + 1):
        results = {10 * i: {metric: float(x)} for i, x in enumerate(losses[:n], 1)}
        if said := stop.on_results(10 * n, name, results):
            return n, said
    return None


@pytest.mark.parametrize(
    ("losses", "patience", "end"),
    [
        ([3, 2, 1, 1.5, 1.6], 2, 5),
        ([3, 2, 1, 1.5, 0.9, 1, 1], 2, 7),  # a better one begins the count anew
        ([3, 3], 1, 2),  # as good is not better
        ([1, float("nan"), float("nan")], 2, 3),
    ],
)
def test_ends_after_so_many_evaluations_without_a_better_one(losses, patience, end):
    said = stops_at(losses, EarlyStop(patience=patience))
    assert (said and said[0]) == end
    if said:
        assert said[1].kind == "finished", "the end that was wanted"


def test_highest_least_and_after():
    rising = [0.1, 0.5, 0.5004, 0.5008, 0.9]
    assert stops_at(rising, EarlyStop("highest accuracy", 2), metric="accuracy") is None
    strict = EarlyStop("highest accuracy", 2, least=0.001)
    assert stops_at(rising, strict, metric="accuracy")[0] == 4
    late = EarlyStop("highest accuracy", 2, least=0.001, after=50)
    assert stops_at(rising, late, metric="accuracy") is None, "0.9 came in time"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"monitor": "val_loss", "patience": 3}, r"argument monitor=. Did you mean metric=\?"),
        ({"mode": "min", "min_delta": 0.1}, r"arguments mode=, min_delta=. Did you .* least=\?"),
        ({"divergence_threshold": 9}, "It has metric, patience, least, after."),
    ],
)
def test_the_arguments_of_other_libraries_are_answered_by_ours(typed: dict, words: str):
    with pytest.raises(ConfigError, match=f"^EarlyStop has no .*{words}"):
        EarlyStop(**typed)


def test_listens_to_the_named_set_or_the_first():
    evaluation = lambda name: EvaluateEvery(every=2, measure=lambda s: {}, log=print, name=name)
    both = {name: evaluation(name) for name in ("valid", "test")}
    first, named, everyone = EarlyStop(), EarlyStop("test/loss"), Everyone()
    add_listeners(both, [first, named])
    assert named in both["test"].listeners
    assert named not in both["valid"].listeners
    assert first in both["valid"].listeners
    assert first not in both["test"].listeners
    add_listeners(both, [everyone])
    assert all(everyone in each.listeners for each in both.values())
    with pytest.raises(ConfigError, match=r"evaluations of tset, and there are valid, test; did"):
        add_listeners(both, [EarlyStop("tset/loss")])
    with pytest.raises(ConfigError, match=r"there is none; give the data .*: valid=\.\.\."):
        add_listeners({}, [first])


class Everyone(Hook):
    """Hears of every set."""

    def on_results(self, step, name, results):
        del step, name, results


def test_the_state_is_measured_at_its_cadence_after_the_numbers_of_its_step():
    order = []
    measure = lambda state: {"loss": abs(float(state) - 6)}
    evaluate = EvaluateEvery(every=3, measure=measure, log=lambda step, x: order.append((step, x)))
    counting.run([on_numbers(lambda step, x: order.append(step)), evaluate], stop=9)
    after = {3: {"loss": 3}, 6: {"loss": 0}, 9: {"loss": 3}}
    assert order == [x for n in range(1, 10) for x in (n, (n, after.get(n))) if x != (n, None)]
    assert evaluate.newest == EvaluationResult(9, {"loss": 3.0})
    assert evaluate.best == EvaluationResult(6, {"loss": 0.0})


def test_the_best_may_be_the_highest_and_is_never_nan():
    numbers = {1: {"accuracy": 0.5}, 2: {"accuracy": math.nan}, 3: {"accuracy": 0.7}, 4: {}}
    evaluate = EvaluateEvery(
        every=1, measure=numbers.__getitem__, log=lambda step, x: None, best="highest accuracy"
    )
    for step in numbers:
        evaluate.measure_once(step, step)
    assert evaluate.best == EvaluationResult(3, {"accuracy": 0.7})


def test_a_step_is_measured_once_and_a_resumed_run_knows_the_results_before():
    measured = []
    evaluate = EvaluateEvery(
        every=2,
        measure=lambda state: {"loss": measured.append(float(state)) or 2.0},
        log=lambda step, x: None,
        results={2: {"loss": 3.0}, 4: {"loss": 1.0}},
    )
    heard = []
    add_listeners({"valid": evaluate}, [on_results(lambda step, numbers: heard.append(step))])
    assert evaluate.newest == EvaluationResult(4, {"loss": 1.0})
    assert evaluate.verdict() is None
    ended = counting.run([evaluate], start=4, stop=8)
    evaluate.measure_once(ended.step, ended.state)
    assert evaluate.verdict() is None
    assert measured == [6.0, 8.0]
    assert heard == [4, 6, 8], "each once"
    assert evaluate.best == EvaluationResult(4, {"loss": 1.0})
