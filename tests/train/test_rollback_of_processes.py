"""Two real processes meet a fault that only one of them reads, and roll back together."""

import json
import os
import sys
from pathlib import Path

import pytest

from chaos.numbers import different
from jtrain.distributed.launcher import launch
from jtrain.io import jsonl

SCRIPT = Path(__file__).with_name("rollback_process.py")


@pytest.mark.thorough
def test_two_processes_decide_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPT.parent), *sys.path]))
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    assert launch(command, processes=2, devices=2) == 0
    ends = [json.loads(Path(f"ends-{index}.json").read_text()) for index in range(2)]
    assert ends[0] == ends[1]
    assert [end[:2] for end in ends[0].values()][:4] == [["done", 12]] * 4
    for went, never in (("nan", "no-nan"), ("spike", "no-spike")):
        assert different(Path("runs", went), Path("runs", never)) == []
        (event,) = jsonl.complete_rows(Path("runs", went, "events.jsonl"))
        assert event["done"] == "rolled back"
        assert len(event["rows"]) == 16, "of the whole batch"
    status, _, why = ends[0]["stops"]
    assert status == "failed"
    assert "1 of 3 are not finite, the first of them up." in why
