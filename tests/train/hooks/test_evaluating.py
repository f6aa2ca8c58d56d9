import math

import counting

from jtrain.train.hooks import EvaluateEvery, EvaluationResult, on_numbers


def test_the_state_is_measured_at_its_cadence_after_the_numbers_of_its_step():
    order = []
    measure = lambda state: {"loss": abs(float(state) - 6)}
    evaluate = EvaluateEvery(every=3, measure=measure, log=lambda step, x: order.append((step, x)))
    counting.run([on_numbers(lambda step, x: order.append(step)), evaluate], stop=9)
    assert order == [
        1,
        2,
        3,
        (3, {"loss": 3}),
        4,
        5,
        6,
        (6, {"loss": 0}),
        7,
        8,
        9,
        (9, {"loss": 3}),
    ]
    assert evaluate.newest == EvaluationResult(9, {"loss": 3.0})
    assert evaluate.best == EvaluationResult(6, {"loss": 0.0})
    assert evaluate.latest() == 3.0


def test_before_the_first_result_there_is_none():
    evaluate = EvaluateEvery(every=3, measure=lambda state: {}, log=lambda step, x: None)
    assert (evaluate.newest, evaluate.best, evaluate.latest()) == (None, None, None)


def test_the_best_may_be_the_highest_and_is_never_nan():
    numbers = {1: {"accuracy": 0.5}, 2: {"accuracy": math.nan}, 3: {"accuracy": 0.7}, 4: {}}
    evaluate = EvaluateEvery(
        every=1, measure=numbers.__getitem__, log=lambda step, x: None, best="highest accuracy"
    )
    for step in numbers:
        evaluate.at(step, step)
    assert evaluate.best == EvaluationResult(3, {"accuracy": 0.7})


def test_a_step_is_measured_once_and_a_resumed_run_knows_the_results_before():
    measured = []
    evaluate = EvaluateEvery(
        every=2,
        measure=lambda state: {"loss": measured.append(float(state)) or 2.0},
        log=lambda step, x: None,
        results={2: {"loss": 3.0}, 4: {"loss": 1.0}},
    )
    assert evaluate.newest == EvaluationResult(4, {"loss": 1.0})
    ended = counting.run([evaluate], start=4, stop=8)
    evaluate.at(ended.step, ended.state)
    assert measured == [6.0, 8.0]
    assert evaluate.best == EvaluationResult(4, {"loss": 1.0})
