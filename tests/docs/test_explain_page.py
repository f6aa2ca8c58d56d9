"""The numbers of docs/explain.md are those that the command prints."""

import re
from pathlib import Path

import pytest
from quick_study import config_of

from jtrain.inspect.explain.explain import explain
from jtrain.inspect.explain.text import describe_step, format_tree
from jtrain.train.setup import set_up

ROOT = Path(__file__).parents[2]
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs/explain.md").read_text(), re.M | re.S)
BLOCKS = [text for language, text in FENCED if not language]

NUMBER = re.compile(r"[\d.]+")


def numbers(lines: list[str]) -> list[float]:
    """Return the numbers of a text, in order."""
    return [float(x) for line in lines for x in NUMBER.findall(line) if x.strip(".")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("block", "settings"), [(0, []), (1, ["model.remat=full"])], ids=["plain", "remat"]
)
def test_the_blocks_are_what_is_printed(block, settings):
    """On one device: the tests have eight."""
    config = config_of(ROOT / "configs/shakespeare.yaml", ["parallel.devices=1", *settings])
    found, _ = explain(set_up(config), compiles=False)
    lines = [*describe_step(found)[:-1], "", *format_tree(found.modules, everything=False)]
    printed, shown = ([x for x in text if x] for text in (lines, BLOCKS[block].splitlines()))
    assert [NUMBER.sub("", x).split() for x in printed] == [
        NUMBER.sub("", x).split() for x in shown
    ]
    # Three digits are printed, and versions of JAX count the bytes of some operations otherwise.
    assert numbers(printed) == pytest.approx(numbers(shown), rel=0.02)
