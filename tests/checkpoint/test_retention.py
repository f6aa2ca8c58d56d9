"""Retention: the best checkpoint by a metric, and which steps are deleted."""

import pytest

from jtrain.checkpoint.retention import BestMetric, best_step


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss", 1),
        ("highest loss", 2),
        ("accuracy", 2),
        ("valid/accuracy", 2),
        ("correct", 2),
        ("lowest accuracy", 1),
        ("return", 1),
        ("highest return", 2),
    ],
)
def test_more_is_better_of_accuracy_and_of_what_is_called_highest(text, best):
    goal = BestMetric.parse(text)
    assert goal is not None
    assert goal.name == text.split()[-1]
    assert best_step({1: 0.1, 2: 0.9}, goal) == best
