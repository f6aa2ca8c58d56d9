"""What is near is judged by the largest term that was summed, and in one place."""

import ast
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close

TESTS = Path(__file__).parent
# numpy's own comparisons take an element's own size, or a number of digits.
REFUSED = {
    *("assert_allclose", "assert_almost_equal", "assert_approx_equal"),
    *("assert_array_almost_equal", "allclose", "isclose"),
}


def test_one_element_that_is_wrong_is_seen():
    want = np.linspace(-1, 1, 1000)
    assert_close(want + 1e-7, want, 1e-6)
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 1000"):
        assert_close(want + 1e-5 * (np.arange(1000) == 3), want, 1e-6)


def test_no_test_compares_by_the_size_of_an_element():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == "comparison.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in REFUSED:
                found.append(f"{path.relative_to(TESTS)}:{node.lineno} {node.attr}")
    assert not found, (
        f"{', '.join(found)}: an element may be the remainder of a cancellation, whose rounding "
        "another processor's order of sums changes. Write `assert_close(got, want, within)` or "
        "`distance(got, want) < within` from tests/comparison.py."
    )
