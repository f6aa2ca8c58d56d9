"""The README: its example runs, the map and its links name what exists, and an install is small."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from plain_environ import run_python

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
AGENTS = (ROOT / "AGENTS.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README)
TEST = "python3 -m pip install -e '.[test]' && python3 -m pytest"


pytestmark = pytest.mark.usefixtures("from_the_top")


(EXAMPLE,) = [code for language, code in BLOCKS if language == "python"]


def test_the_short_example_learns_as_printed():
    last = run_python("-W", "error", "-c", EXAMPLE).stdout.splitlines()[-1]
    printed = re.fullmatch(r"{'loss': (\d+\.\d+).*} \(1000,\)", last)
    assert printed
    assert float(printed[1]) < 0.3  # the variance of what it learns is 0.5


def test_install_and_test_commands_are_those_that_ci_runs():
    lines = [line for _, code in BLOCKS for line in code.splitlines()]
    assert lines[0] == "python3 -m pip install -e . && jtrain run configs/shakespeare.yaml"
    assert TEST in lines
    assert TEST in (ROOT / ".ci" / "run").read_text().splitlines()


def mapped() -> tuple[set[str], set[str]]:
    """Return the names in the map: those of the repository and those of the package."""
    (map_,) = [code for _, code in BLOCK.findall(AGENTS) if code.startswith("jtrain/\n")]
    inside, outside = set(), set()
    for line in map_.splitlines():
        names = re.match(r"\s*((?:\w+(?:/|\.py) ?)+)", line)
        assert names, f"a line of the map begins with no name: {line}"
        (inside if line.startswith(" ") else outside).update(names[1].split())
    return outside, inside


def test_every_name_in_the_map_exists():
    outside, inside = mapped()
    missing = [name for name in outside if not (ROOT / name).exists()]
    missing += [f"jtrain/{name}" for name in inside if not (ROOT / "jtrain" / name).exists()]
    assert not missing


def test_the_map_has_every_package():
    parts = {path.name for path in (ROOT / "jtrain").glob("*.py")}
    parts |= {f"{path.parent.name}/" for path in (ROOT / "jtrain").glob("*/__init__.py")}
    assert len(parts) == 21
    assert parts - mapped()[1] == set(), "give each a place in the map of AGENTS.md"


def test_the_tests_it_names_exist():
    where = CONTRIBUTING.split("\n## Where do I add ...\n")[1]
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", where))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def requirements(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Return what a package requires on this machine, with these extras."""
    every = [Requirement(text) for text in metadata.requires(name) or []]
    markers = [{"extra": extra} for extra in extras or {""}]
    return [r for r in every if r.marker is None or any(r.marker.evaluate(m) for m in markers)]


def test_a_core_install_is_small_and_brings_no_other_framework():
    visited, pending = set(), [("jtrain", frozenset())]
    while pending:
        package = pending.pop()
        if package not in visited:
            visited.add(package)
            needed = requirements(*package)
            pending += [(canonicalize_name(r.name), frozenset(r.extras)) for r in needed]
    packages = {name for name, _ in visited} - {"jtrain"}
    assert packages > {"jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy"}
    assert len(packages) <= 45, sorted(packages)
    assert not packages & {"torch", "tensorflow", "tensorflow-cpu", "keras"}
    assert not packages & {"pytest", "ruff"}
