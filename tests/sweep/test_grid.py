"""Settings of `jtrain sweep CONFIG`, and the grids and search spaces they define."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.errors import ConfigError
from jtrain.sweep.grid import label, parse_grid, split_values
from jtrain.sweep.search import SearchRange, corners, parse_space


def test_the_last_key_changes_fastest_and_single_values_are_fixed():
    found = parse_grid(["optimizer.lr=1e-4,3e-4", "steps=20", "seed=0..2"])
    assert found.fixed == ["steps=20"]
    wanted = itertools.product(["1e-4", "3e-4"], ["0", "1", "2"])
    assert [tuple(point.values()) for point in found.points()] == list(wanted)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ("[8,16]", ["[8,16]"]),
        ("[8,16],[32]", ["[8,16]", "[32]"]),
        ("{kind: sgd, lr: 1},{kind: adamw}", ["{kind: sgd, lr: 1}", "{kind: adamw}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"]",[1]', ['"]"', "[1]"]),
        ("0..3", ["0", "1", "2", "3"]),
        ("0..10..5,64", ["0", "5", "10", "64"]),
        ("-2..0", ["-2", "-1", "0"]),
        ("../text,a..b/c", ["../text", "a..b/c"]),
        ("true, false", ["true", "false"]),
    ],
)
def test_values(text, values):
    found = parse_grid([f"key={text}"])
    assert (found.axes.get("key") or [found.fixed[0].partition("=")[2]]) == values


words = st.text("ab1.-", min_size=1, max_size=4)
lists = st.lists(words, min_size=1, max_size=3).map(lambda xs: f"[{','.join(xs)}]")


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(words | lists | words.map(repr), min_size=1, max_size=5))
def test_only_commas_outside_of_brackets_and_quotes_split(values):
    assert split_values(",".join(values)) == values


def test_labels_are_short_plain_and_distinguish_keys():
    point = {"optimizer.lr": "1e-4", "model.channels": "[8,16]", "seed": "-1"}
    assert label(point, list(point)) == "lr=1e-4,channels=8-16,seed=-1"
    both = {"data.size": "1", "model.size": "../x y"}
    assert label(both, list(both)) == "data.size=1,model.size=..-x-y"


def test_ranges_and_choices_are_searched():
    found, fixed = parse_space(
        ["optimizer.lr=1e-5..1e-2:log", "model.layers=1..8", "model.drop=0..0.5", "a=x,y", "b=1"]
    )
    assert fixed == ["b=1"]
    assert found == {
        "optimizer.lr": SearchRange(1e-5, 1e-2, log=True, integer=False),
        "model.layers": SearchRange(1.0, 8.0, log=False, integer=True),
        "model.drop": SearchRange(0.0, 0.5, log=False, integer=False),
        "a": ["x", "y"],
    }
    tried = list(corners(found))
    assert {"1e-05", "0.01"} == {point["optimizer.lr"] for point in tried}
    assert {"x", "y"} == {point["a"] for point in tried}


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["lr=0..1:log"], "a log scale needs a range above 0"),
        (["lr=2..1"], "write 1..2"),
        (["lr=1"], "no key is searched"),
        (["lr=1..2", "lr=3"], "given twice"),
        (["a=x,x"], "a value is missing or repeated"),
    ],
)
def test_an_invalid_search_space_is_refused(typed, told):
    with pytest.raises(ConfigError, match=told):
        parse_space(typed)
