"""`jtrain show RUN --speed` prints the time of a step, the rate and the memory."""

import json

from quick_study import write_study

from jtrain.cli import main


def test_a_run_has_its_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_study(tmp_path)
    assert main(["run", str(path), "steps=1", "name=short", "evaluate.every=0"]) == 0
    assert main(["show", "short", "--speed"]) == 2
    assert "log.every=1" in capsys.readouterr().err
    assert main(["run", str(path), "log.every=1", "evaluate.every=0", "steps_per_call=1"]) == 0
    assert "p50" in capsys.readouterr().out
    assert main(["show", "quick", "--speed"]) == 0
    table = capsys.readouterr().out
    assert "median, of steps that are done" in table
    assert "compiling" in table
    assert "of the process, at most so far" in table
    assert main(["show", "quick", "--speed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["p50"] <= found["p90"]
    assert found["compile"] > 0
    assert found["first_call"] > 0
    assert found["memory"] <= found["memory_peak"]
