"""Each promise in SECURITY.md names a test that exists and runs."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
PROMISES = TEXT.split("\n## What is promised")[1].split("\n## ")[0]


def names_in(path: Path) -> set[str]:
    """Return the tests of a file that no mark deselects."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not any("skip" in ast.unparse(mark) or "slow" in ast.unparse(mark)
                   for mark in node.decorator_list)
    }  # fmt: skip


def test_each_promise_names_tests_that_run():
    rows = [line for line in PROMISES.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 5
    for row in rows:
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row)
        assert named, f"{row} names no test"
        for path, test in named:
            assert test in names_in(ROOT / path), f"{path} has no {test} that is run always"


def test_each_named_file_exists():
    for path in re.findall(r"`((?:jtrain|tests)/[\w/]+\.py)", TEXT):
        assert (ROOT / path).is_file(), path
