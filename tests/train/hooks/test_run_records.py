"""What a run writes as it trains: metrics, log lines and samples, whole after a kill."""

import io
import json
import logging
import math
import os
import subprocess

import numpy as np
import pytest

from jtrain.errors import CheckpointError, LossError
from jtrain.io.jsonl import JsonlWriter, read_rows
from jtrain.io.log import LOG, RunLog, log_progress
from jtrain.optim import Cosine
from jtrain.train.hooks import LogHook, log
from jtrain.train.hooks.log import MetricsFile


def written(path, *, resumed_at=None, stop=6):
    """Write rows up to `stop`, as a run that evaluates every second step."""
    file = MetricsFile(JsonlWriter(path, resumed_at=resumed_at), every=1)
    for step in range((resumed_at or 0) + 1, stop + 1):
        file.on_numbers(step, {"loss": 1 / step, "grad_norm": step / 7})
        if step % 2 == 0:
            file.row(step, "valid", {"loss": 2 / step, "rows": 5})
    file.rows.close()
    return path.read_bytes()


def test_rows_are_json_and_come_back(tmp_path):
    lines = written(tmp_path / "m.jsonl", stop=2).decode().splitlines()
    assert lines == [
        '{"step": 1, "loss": 1.0, "grad_norm": 0.14285714285714285}',
        '{"step": 2, "loss": 0.5, "grad_norm": 0.2857142857142857}',
        '{"step": 2, "valid/loss": 1.0, "valid/rows": 5}',
    ]
    assert read_rows(tmp_path / "m.jsonl") == [json.loads(line) for line in lines]
    assert log.read_results(tmp_path / "m.jsonl", "valid") == {2: {"loss": 1.0, "rows": 5}}
    assert log.read_results(tmp_path / "m.jsonl", "")[1] == {"loss": 1.0, "grad_norm": 1 / 7}
    assert read_rows(tmp_path / "none.jsonl") == []


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    file = MetricsFile(JsonlWriter(tmp_path / "m.jsonl"), every=1)
    file.on_numbers(1, {"loss": math.nan, "up": math.inf, "each": np.array([-np.inf, 1.5])})
    file.rows.close()
    refuse = lambda name: pytest.fail(f"{name} is not JSON")
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": "NaN", "up": "Infinity", "each": ["-Infinity", 1.5]}
    (row,) = read_rows(tmp_path / "m.jsonl")
    assert math.isnan(row["loss"])
    assert (row["up"], row["each"]) == (math.inf, [-math.inf, 1.5])


def test_a_file_cut_at_any_byte_is_completed_by_the_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    whole = written(tmp_path / "whole.jsonl", stop=4)
    kept = whole.index(b'{"step": 3')  # the rows up to the checkpoint of step 2
    for cut in range(kept, len(whole) + 1, 7):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut])
        assert written(tmp_path / "cut.jsonl", resumed_at=2, stop=4) == whole
    assert len(whole) - kept > 100
    assert {path.name for path in tmp_path.iterdir()} == {"whole.jsonl", "cut.jsonl"}


def test_rows_can_be_forced_to_the_disk_before_a_checkpoint(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    file = MetricsFile(JsonlWriter(tmp_path / "m.jsonl"), every=1)
    file.on_numbers(1, {"loss": 1.0})
    file.rows.sync()
    file.rows.close()
    assert synced == [len('{"step": 1, "loss": 1.0}\n')]


def test_a_damaged_row_in_the_middle_is_named_with_its_fix(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{oops}\n", *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"row 3 of .*oops.*sed -i 3d") as error:
        read_rows(path)
    subprocess.run(str(error.value).rpartition("remove it: ")[2], shell=True, check=True)
    assert len(read_rows(path)) == len(lines) - 1


def test_a_metric_called_step_is_refused(tmp_path):
    file = MetricsFile(JsonlWriter(tmp_path / "m.jsonl"), every=1)
    with pytest.raises(LossError, match=r'called "step".*another name'):
        file.on_numbers(1, {"step": 3.0})
    file.rows.close()


def test_the_rate_of_a_line_is_that_of_its_update(caplog):
    rate = Cosine(warmup=3).build(1.0, 10)
    log = LogHook(every=1, stop=10, learning_rate=rate)
    for step, skipped in ((1, 0), (2, 0), (3, 1), (4, 1)):  # the third is skipped
        log.on_numbers(step, {"loss": 1.0, "skipped": float(skipped)})
    rates = [line.partition("lr ")[2].split()[0] for line in caplog.messages]
    assert [rates[i] for i in (0, 1, 3)] == ["2.50e-01", "5.00e-01", "7.50e-01"]


def test_lines_go_to_the_file_to_the_screen_and_to_handlers_of_others(tmp_path, capsys, caplog):
    with RunLog() as run:
        LOG.info("before there is a file, with hf_%s", 20 * "x")
        run.open(tmp_path / "log.txt")
        log_progress("step 1")
        LOG.warning("careful")
    LOG.info("after the run")
    lines = ["before there is a file, with <redacted>", "step 1", "careful"]
    assert (tmp_path / "log.txt").read_text().splitlines() == lines
    assert capsys.readouterr().out.splitlines() == lines
    assert caplog.messages == [*lines, "after the run"]


def test_a_console_of_the_root_logger_does_not_print_a_line_again(capsys, monkeypatch):
    """Such a handler is added by absl, at the first message of Orbax."""
    console, others = logging.StreamHandler(), io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [console])
    with RunLog():
        LOG.info("once")
        logging.root.addHandler(logging.StreamHandler(others))
        LOG.info("kept")
    assert capsys.readouterr().out == "once\nkept\n"
    assert others.getvalue() == "kept\n"


def test_a_live_display_gets_what_it_does_not_show_already(capsys):
    class Display:
        live = True

        def print(self, line):
            print(f"above: {line}")

    with RunLog() as outer, RunLog() as run:
        run.display = Display()
        log_progress("step 1")
        LOG.warning("careful")
        assert outer.display is None
    assert capsys.readouterr().out == "above: careful\n"
