"""Cases of a test by name: a few that are always run, the others where there is more time."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def by_name(
    cases: Mapping[str, Any], quick: Collection[str], others: pytest.MarkDecorator
) -> list[Any]:
    """One parameter for each case; those that are not `quick` bear the mark of the others."""
    assert set(quick) <= set(cases), "each quick one is a case"
    return [
        pytest.param(case, id=name, marks=() if name in quick else others)
        for name, case in cases.items()
    ]
