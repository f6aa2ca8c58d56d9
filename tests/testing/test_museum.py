"""The museum: each defect is large and named, jtrain has none, the chart has these numbers."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.testing import museum
from jtrain.testing.exhibit import right_rule
from jtrain.testing.museum import EXHIBITS, find_exhibit

ROOT = Path(__file__).parent.parent.parent
NAMES = [exhibit.name for exhibit in EXHIBITS]


def printed(*words):
    """Return what `jtrain museum` prints; the devices of the tests stay."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("JAX_NUM_CPU_DEVICES", "8")
        patch.setenv("XLA_FLAGS", "")
        assert main(["museum", *words]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def records():
    found = json.loads(printed("--json"))["exhibits"]
    return {record["exhibit"]: record for record in found}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_defect_is_large_and_named_and_jtrain_has_none(name, records):
    record = records[name]
    assert record["cause"] == find_exhibit(name).cause
    assert record["why"]
    assert record["error"] is None or record["error"] > 1e-3
    assert record["jtrain"] < 1e-6


@pytest.mark.thorough
def test_the_picture_and_the_page_have_the_numbers_of_the_command(records, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    from museum import draw

    kept = (ROOT / "docs" / "pictures" / "museum.svg").read_text()
    # The last digit of jtrain's own bar depends on the machine.
    bars = [
        [line for line in text.splitlines() if "#7ee787" not in line or "<rect" not in line]
        for text in (draw(list(records.values())), kept)
    ]
    assert bars[0] == bars[1]
    page = (ROOT / "docs" / "museum.md").read_text()
    for record in records.values():
        error = "NaN" if record["error"] is None else f"{record['error']:.2g}"
        row = f"| [{record['exhibit']}]({record['thread']}) | {record['what']} | {error}"
        assert row in page
        assert f"| {record['cause']} | {record['status']} |" in page


@pytest.mark.thorough
def test_the_right_rule_is_accepted():
    right = dataclasses.replace(find_exhibit("soup-932"), rule=right_rule)
    assert max(right.measure()) < 1e-6
    assert right.check().ok


def test_torchtitans_own_example_gives_its_numbers():
    batches = [((2.0, {}), 1.0), ((90.0, {}), 9.0)]
    assert museum.torchtitan_4167(batches, lambda tree: tree)[0] == 6.0
    assert right_rule(batches, lambda tree: tree)[0] == 9.2


@pytest.mark.thorough
def test_an_exhibit_prints_its_formula_the_right_one_and_the_report():
    text = printed("torchtitan-4174")
    assert "def torchtitan_4174(" in text
    assert "def right_loss(" in text
    assert "Relative error of the gradient, 2 microbatches x 2 devices: 0.3; jtrain's: " in text
    assert "the contents of hidden rows are counted in term 0" in text
    assert "comparisons FAIL." in text
    found = json.loads(printed("torchtitan-4174", "--json"))
    assert found["cause"] == "hidden rows"
    assert found["report"]["ok"] is False
