"""Promises of SECURITY.md: no data runs as code, no test needs a network, packages are locked."""

import ast
import re
import socket
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jtrain").rglob("*.py"))
LOCKS = sorted((ROOT / "requirements").glob("ci-*.txt"))
TEXT = (ROOT / "SECURITY.md").read_text()
PROMISES = TEXT.split("\n## What is promised")[1].split("\n## ")[0]


def test_no_module_unpickles_arrays_or_trusts_code():
    """What ruff has no rule for; pyproject.toml has the others."""
    assert FILES
    for path in FILES:
        assert not re.search(r"allow_pickle=(?!False)|trust_remote_code=", path.read_text()), path


def test_no_test_can_reach_another_machine():
    with socket.socket() as one:
        for call in (lambda: one.connect(("192.0.2.1", 80)), lambda: one.bind(("0.0.0.0", 0))):
            with pytest.raises(AssertionError, match="no test needs a network"):
                call()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_each_required_package_by_digest(lock: Path):
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ;[^\\\n]*)? \\\n((?:    --hash=\S+(?: \\)?\n)+)",
        lock.read_text(),
        re.M,
    )
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in " #"]
    assert len(entries) == len(lines) > 50, "each line is a package, a version and its digests"
    assert all(re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", e[2]) for e in entries)
    pinned = {canonicalize_name(name): version for name, version, _ in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    asked += project["optional-dependencies"]["dev"]
    for wanted in map(Requirement, asked):
        if wanted.name != "jtrain":
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted


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
