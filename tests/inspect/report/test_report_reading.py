"""A damaged run is read as far as possible, and each damage is reported."""

import json
import math
from pathlib import Path

from jtrain.inspect.report.read_run import read_run
from jtrain.inspect.report.series import metric_charts, newest_matrices, thin


def write_run(path: Path, rows=(), **files: str) -> Path:
    """Write a run's directory with these rows of metrics and other files by name, dots as `_`."""
    path.mkdir(parents=True)
    texts = {
        "config_yaml": f"experiment: toy\nname: {path.name}\nsteps: 40\noptimizer: {{lr: 0.1}}\n",
        "run_json": json.dumps({"status": "done", "step": 40, "jtrain": "0.1.0"}),
        "metrics_jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "speed_jsonl": '{"step": 10, "rows_per_second": 50.0, "waiting": 0.1, "trained": 2.0}\n',
        **files,
    }
    for name, text in texts.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


ROWS = [{"step": 10 * i, "loss": 1.0 / i} for i in range(1, 5)]


def test_an_undamaged_run_has_no_troubles(tmp_path: Path):
    story = read_run(write_run(tmp_path / "a", ROWS))
    assert story.troubles == ()
    assert (story.name, story.status, story.step) == ("a", "done", 40)
    assert story.config["optimizer.lr"] == 0.1
    assert list(story.metrics) == ROWS


def test_unreadable_rows_are_reported_and_the_others_read(tmp_path: Path):
    lines = [json.dumps(row) for row in ROWS]
    lines[1:1] = ["garbage", '{"loss": 3}', "[1]", '{"step": true}']
    story = read_run(
        write_run(tmp_path / "a", metrics_jsonl="\n".join([*lines, '{"step": 50, "lo']))
    )
    assert list(story.metrics) == ROWS
    rows = [line.split(" cannot")[0] for line in story.troubles]
    assert rows == [f"row {i} of metrics.jsonl" for i in (2, 3, 4, 5, 9)]


def test_many_damaged_rows_are_summarized(tmp_path: Path):
    story = read_run(write_run(tmp_path / "a", metrics_jsonl="no\n" * 1000))
    assert len(story.troubles) == 6
    assert story.troubles[-1] == "and 995 more rows of metrics.jsonl"


def test_a_repeated_step_counts_once_and_is_reported(tmp_path: Path):
    rows = [*ROWS, {"step": 20, "loss": 7.0}, {"step": 20, "valid/loss": 1.0}]
    story = read_run(write_run(tmp_path / "a", rows))
    assert [r["loss"] for r in story.metrics if "loss" in r] == [1.0, 7.0, 1 / 3, 0.25]
    assert story.troubles == ("row 5 of metrics.jsonl repeats step 20; the last row counts",)


def test_missing_and_truncated_files_are_reported(tmp_path: Path):
    path = write_run(tmp_path / "a", ROWS, run_json='{"status": "do', config_yaml="steps: [1\n")
    (path / "speed.jsonl").unlink()
    story = read_run(path)
    assert story.status == "unknown"
    assert len(story.metrics) == 4
    said = "\n".join(story.troubles)
    assert "speed.jsonl is missing" in said
    assert "run.json is not a JSON object" in said
    assert "config.yaml:" in said


def test_a_directory_without_a_run_is_reported(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "metrics.txt").write_bytes(b"\xff\x00")
    story = read_run(tmp_path / "photos")
    assert (story.name, story.status, story.step) == ("photos", "unknown", 0)
    assert len(story.troubles) == 1
    assert "has no run" in story.troubles[0]


def test_invalid_utf8_damages_only_one_row(tmp_path: Path):
    path = write_run(tmp_path / "a", ROWS)
    (path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n" + (path / "metrics.jsonl").read_bytes())
    story = read_run(path)
    assert list(story.metrics) == ROWS
    assert len(story.troubles) == 1


def test_an_invalid_picture_is_reported(tmp_path: Path):
    path = write_run(tmp_path / "a", ROWS)
    (path / "pictures").mkdir()
    (path / "pictures" / "grid-10.png").write_bytes(b"\x89PNG\r\n\x1a\n....")
    (path / "pictures" / "grid-20.png").write_bytes(b"GIF89a")
    story = read_run(path)
    assert [(p.name, p.step) for p in story.pictures] == [("grid", 10)]
    assert "pictures/grid-20.png" in story.troubles[0]


def test_training_and_validation_of_a_metric_share_a_chart_and_loss_comes_first(tmp_path: Path):
    rows = [{"step": 1, "accuracy": 0.5, "loss": 2.0}, {"step": 1, "valid/loss": "NaN"}]
    found = metric_charts(
        [read_run(write_run(tmp_path / "a", rows)), read_run(write_run(tmp_path / "b"))]
    )
    assert [chart["title"] for chart in found] == ["loss", "accuracy"]
    assert found[0]["lines"] == [
        {"name": "loss", "runs": [[[1, 2.0]], []]},
        {"name": "valid/loss", "runs": [[[1, None]], []]},
    ]


def test_thinning_keeps_peaks():
    points = [[i, math.sin(i / 500)] for i in range(10_000)]
    points[4321] = [4321, 99.0]
    points[77] = [77, None]
    found = thin(points)
    assert len(found) <= 1200
    assert [4321, 99.0] in found
    assert [p[0] for p in found] == sorted(p[0] for p in found)


def test_the_newest_table_of_numbers_is_shown_and_a_ragged_one_is_not(tmp_path: Path):
    rows = [
        {"step": 1, "valid/confusion": [[1, 0], [0, 1]], "ragged": [[1], [1, 2]]},
        {"step": 2, "valid/confusion": [[0.5, "NaN"], [0, 1]], "words": ["a", "b"], "none": []},
    ]
    (matrix,) = newest_matrices(read_run(write_run(tmp_path / "a", rows)))
    assert matrix == {"name": "valid/confusion", "step": 2, "cells": [[0.5, None], [0.0, 1.0]]}
