"""Cases of a test by name: a few that are always run, the others where there is more time."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def by_name(
    cases: Mapping[str, Any] | Collection[str], quick: Collection[str], others: pytest.MarkDecorator
) -> list[Any]:
    """One parameter for each case; those that are not `quick` bear the mark of the others.

    Cases may be names alone, each of which is its own parameter.
    """
    cases = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    assert set(quick) <= set(cases), "each quick one is a case"
    return [
        pytest.param(case, id=name, marks=() if name in quick else others)
        for name, case in cases.items()
    ]


def sampled(cases: Mapping[str, Any], quick: Collection[str], *, each: int) -> list[Any]:
    """One parameter for each case; of those that are not `quick` every `each`-th is thorough.

    The others are slow.
    """
    assert set(quick) <= set(cases), "each quick one is a case"
    rest = {name: place for place, name in enumerate(n for n in cases if n not in quick)}
    marks = {n: pytest.mark.slow if at % each else pytest.mark.thorough for n, at in rest.items()}
    return [pytest.param(case, id=n, marks=marks.get(n, ())) for n, case in cases.items()]
