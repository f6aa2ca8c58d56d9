"""Patterns find leaves by their names, and say so when they do not."""

import subprocess
import sys

import pytest

from jtrain.errors import ConfigError
from jtrain.optim.groups import ParamGroup, check_patterns, group_of, matches, nearest

NAMES = ["embed/table", "blocks/0/mlp/kernel", "blocks/0/mlp/bias", "blocks/1/mlp/kernel", "head/w"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", NAMES),
        ("*/embed/*", ["embed/table"]),
        ("embed/*", ["embed/table"]),
        ("*/kernel", ["blocks/0/mlp/kernel", "blocks/1/mlp/kernel"]),
        ("blocks/[1-9]/*", ["blocks/1/mlp/kernel"]),
        ("*/mlp/????", ["blocks/0/mlp/bias"]),
        ("kernel", []),
        ("*/Kernel", []),
    ],
)
def test_a_pattern_finds_its_leaves(pattern: str, found: list[str]):
    assert [name for name in NAMES if matches(name, pattern)] == found


def test_the_first_group_that_matches_counts():
    groups = (
        ParamGroup(match="*/bias", lr_factor=2.0),
        ParamGroup(match="blocks/*", lr_factor=3.0),
    )
    factors = {n: g.lr_factor for n in NAMES if (g := group_of(n, groups))}
    assert factors == {
        "blocks/0/mlp/kernel": 3.0,
        "blocks/0/mlp/bias": 2.0,
        "blocks/1/mlp/kernel": 3.0,
    }


def test_the_nearest_names_come_first():
    assert nearest("*/embedding/*", NAMES)[0] == "embed/table"
    assert nearest("*/kernels", NAMES)[:2] == ["blocks/0/mlp/kernel", "blocks/1/mlp/kernel"]
    assert nearest("*/x", []) == []


def test_patterns_that_all_do_something_pass():
    groups = [ParamGroup(match="*/embed/*", freeze=True), ParamGroup(match="*", lr_factor=0.5)]
    check_patterns(NAMES, groups, ["*/kernel", "head/?"])
    with pytest.raises(ConfigError):
        check_patterns(NAMES, groups, ["*/kernel", "tail/?"])


@pytest.mark.thorough
def test_importing_the_optimizers_is_cheap():
    code = (
        "import sys, jtrain.optim; "
        "sys.exit(sum(m in sys.modules for m in ('flax', 'orbax', 'grain', 'ruamel')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
