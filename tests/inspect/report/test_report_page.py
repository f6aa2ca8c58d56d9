"""The page is self-contained, escapes the contents of runs, and has all curves and tables."""

import base64
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report_reading import ROWS, write_run

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.inspect.report import read_run, render_page
from jtrain.inspect.report.facts import summarize_run
from jtrain.inspect.report.find_runs import find_runs
from jtrain.io.png import encode_png
from jtrain.sweep.members import read_record

EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


class Elements(HTMLParser):
    """Collector of a page's elements with their attributes, and of the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] == "script" and self.scripts[-1] == "":
            self.scripts[-1] = data


def data_of(text: str) -> dict:
    return json.loads(Elements(text).scripts[0])


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path):
    text = render_page([read_run(write_run(tmp_path / "a", ROWS))])
    for tag, attributes in Elements(text).found:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "default-src 'none'" in text
    outside = set(re.findall(r"https?://[^\s\"')]+", text))
    assert outside == {"http://www.w3.org/2000/svg"}  # a namespace, not fetched


def test_names_samples_and_values_are_escaped(tmp_path: Path):
    quiet = render_page(
        [read_run(write_run(tmp_path / "a", ROWS, samples_txt="hello", log_txt="a"))]
    )
    evil = write_run(
        tmp_path / "b",
        [{**row, EVIL: 1.0} for row in ROWS],
        samples_txt=EVIL,
        log_txt=EVIL,
        config_yaml=f"name: '{EVIL}'\nnote: '{EVIL}'\n'{EVIL}': 1\nsteps: '{EVIL}'\n",
        run_json=json.dumps({"status": EVIL, "why": EVIL, "step": 40, "argv": [EVIL], "git": EVIL}),
    )
    loud = render_page([read_run(evil)])
    assert "alert(1)" in loud
    kinds = lambda text: {tag for tag, _ in Elements(text).found}
    assert kinds(loud) <= kinds(quiet)
    assert not any("onerror" in attributes for _, attributes in Elements(loud).found)
    assert len(Elements(loud).scripts) == 2
    assert data_of(loud)["runs"] == [EVIL]
    assert EVIL in {chart["title"] for chart in data_of(loud)["charts"]} | {
        line["name"] for chart in data_of(loud)["charts"] for line in chart["lines"]
    }


@pytest.mark.parametrize("status", ["done", "stopped", "failed", "crashed"])
def test_the_status_of_a_run_has_its_reason(status: str, tmp_path: Path):
    said = json.dumps({"status": status, "why": "OSError: no room", "step": 40})
    text = render_page([read_run(write_run(tmp_path / "a", ROWS, run_json=said))])
    told = f'<span class="status {status}">{status}</span> <small>OSError: no room</small>'
    assert told in text
    assert f".status.{status}" in text


def test_several_runs_share_charts_and_differences_are_listed(tmp_path: Path):
    first = write_run(tmp_path / "a", ROWS)
    second = write_run(tmp_path / "b", ROWS[:2])
    (second / "config.yaml").write_text("experiment: toy\nname: b\noptimizer: {lr: 0.2, b1: 1}\n")
    text = render_page([read_run(first), read_run(second)])
    (loss,) = data_of(text)["charts"]
    assert [len(points) for points in loss["lines"][0]["runs"]] == [4, 2]
    table = text.partition("What differs")[2].partition("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", table)
    assert [cells[i : i + 3] for i in range(0, len(cells), 3)] == [
        ["<code>name</code>", "a", "b"],
        ["<code>steps</code>", "40", "absent"],
        ["<code>optimizer.lr</code>", "0.1", "0.2"],
        ["<code>optimizer.b1</code>", "absent", "1"],
    ]


def test_runs_with_one_name_are_named_by_directory(tmp_path: Path):
    stories = [read_run(write_run(tmp_path / place / "a", ROWS)) for place in ("x", "y")]
    assert data_of(render_page(stories))["runs"] == [str(tmp_path / p / "a") for p in ("x", "y")]


def test_curves_have_every_step_if_steps_are_recorded(tmp_path: Path):
    steps = [
        {"step": 2, "loss": [3.0, "NaN"], "grad_norm": [1.0, 2.0], "batch": [1, 2]},
        {"step": 7, "loss": [2.5] * 5, "grad_norm": [1.5] * 5, "batch": [1] * 5},
    ]
    text = "".join(json.dumps(row) + "\n" for row in steps)
    found = data_of(render_page([read_run(write_run(tmp_path / "a", ROWS, steps_jsonl=text))]))
    lines = {line["name"]: line["runs"][0] for c in found["charts"] for line in c["lines"]}
    assert lines["loss"] == [[1, 3.0], [2, None], *([i, 2.5] for i in range(3, 8))]
    assert len(lines["grad_norm"]) == 7
    assert "batch" not in lines


def cells(text: str) -> list[list[str]]:
    """Return the cells of the first table of a page as text."""
    table = text.partition("<table>")[2].partition("</table>")[0]
    plain = lambda cell: re.sub(r"<[^>]*>", "", cell).strip()
    rows = table.split("<tr>")[1:]
    return [[plain(cell) for cell in re.split(r"</t[hd]>", row)[:-1]] for row in rows]


def test_the_table_has_each_metric_of_the_evaluations(tmp_path: Path):
    valid = [
        {"step": 20, "valid/accuracy": 0.9, "valid/loss": 0.4, "valid/rows": 50, "test/loss": 3.0},
        {"step": 40, "valid/accuracy": 0.8, "valid/loss": 0.3, "valid/confusion": [[1]]},
    ]
    config = "name: a\nsteps: 40\ncheckpoint: {best: highest accuracy}\n"
    story = read_run(write_run(tmp_path / "a", [*ROWS, *valid], config_yaml=config))
    head, row = cells(render_page([story]))
    said = dict(zip(head, row, strict=True))
    assert head[3:8] == ["loss", "valid/loss", "valid/accuracy", "test/loss", "best valid/accuracy"]
    assert said["valid/loss"] == "0.3000"
    assert said["valid/accuracy"] == "0.8000"
    assert said["best valid/accuracy"] == "0.9000 at 20"
    known = summarize_run(story)
    assert known["validation"] == {"valid/loss": 0.3, "valid/accuracy": 0.8, "test/loss": 3.0}
    assert known["best"] == {"name": "valid/accuracy", "value": 0.9, "step": 20}


def test_many_runs_have_distinct_colours(tmp_path: Path):
    text = render_page([read_run(write_run(tmp_path / f"r{i}", ROWS)) for i in range(30)])
    colours = re.findall(r'class="swatch" style="background:([^"]*)"', text)
    assert len(set(colours)) == 30
    assert "<title>r0, r1, r2, r3, r4, r5, r6, r7 and 22 more</title>" in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_draws_titles_and_distinguishes_equal_curves(tmp_path: Path):
    assert CHROMIUM is not None
    stories = [read_run(write_run(tmp_path / name, ROWS)) for name in ("one", "twin")]
    stories.append(read_run(write_run(tmp_path / "other", [*ROWS[:3], {"step": 40, "loss": 3.0}])))
    (tmp_path / "page.html").write_text(render_page(stories))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=3000",
    ]
    url = (tmp_path / "page.html").as_uri()
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    drawn = done.stdout.partition('id="charts"')[2].partition("</section>")[0]
    assert re.findall(r'class="axis"[^>]*>([^<]*)<', drawn) == ["step", "loss"]
    assert "the same curve: one, twin<" in drawn
    lines = re.findall(r'<path class="line"[^>]*>', drawn)
    assert [line.count("stroke-dasharray") for line in lines] == [1, 1, 0]
    assert len(set(re.findall(r'stroke-dashoffset="([^"]*)"', drawn))) == 2


def test_the_page_has_pictures_matrices_and_leaves(tmp_path: Path):
    rows = [*ROWS, {"step": 40, "valid/confusion": [[3, 1], [0, 4]]}]
    leaves = '{"step": 10, "grad_norm": {"block/kernel": 0.5}, "ratio": {"block/kernel": "NaN"}}\n'
    path = write_run(tmp_path / "a", rows, leaves_jsonl=leaves)
    picture = encode_png([[0, 255]])
    (path / "pictures").mkdir()
    (path / "pictures" / "digits-40.png").write_bytes(picture)
    text = render_page([read_run(path)])
    sources = [attributes["src"] for tag, attributes in Elements(text).found if tag == "img"]
    assert sources == [f"data:image/png;base64,{base64.b64encode(picture).decode()}"]
    assert "row 0, column 1: 1, 25.0% of its row" in text
    assert data_of(text)["leaves"] == [
        {"kind": "grad_norm", "title": "block/kernel", "runs": [[[10, 0.5]]]},
        {"kind": "ratio", "title": "block/kernel", "runs": [[[10, None]]]},
    ]


def test_the_command_writes_the_page_and_reports_damages(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), ROWS)
    write_run(Path("runs/b"), metrics_jsonl="x\n")
    assert main(["report", "a"]) == 0
    assert Path("runs/a/report.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert main(["report", "a", "runs/b", "--json", "--out", "new/page.html"]) == 0
    said = capsys.readouterr()
    assert said.err == "runs/b: row 1 of metrics.jsonl cannot be read and is skipped: 'x'\n"
    found = json.loads(said.out)
    assert found["page"] == "new/page.html"
    assert Path(found["page"]).is_file()
    assert [run["loss"] for run in found["runs"]] == [0.25, None]
    assert found["runs"][0]["rate"] == 50.0


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["report", "c"], "c is not a directory. Available in runs/: a"),
        (["report", "empty"], "empty is a directory without a run. Name a run, a sweep, or"),
        (["report", "runs/a/run.json"], "runs/a/run.json is a file. Name a run, a sweep"),
        (["report"], "RUN"),
        (["report", "a", "--out", "runs/a/run.json/x.html"], "cannot be written"),
    ],
)
def test_invalid_commands_are_explained(typed, words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), ROWS)
    Path("empty").mkdir()
    assert main(typed) == 2
    assert words in capsys.readouterr().err


def test_an_empty_directory_gives_a_page(tmp_path: Path):
    (tmp_path / "none").mkdir()
    text = render_page([read_run(tmp_path / "none")])
    assert "has no run" in text
    assert data_of(text)["charts"] == []


@pytest.mark.parametrize("kind", ["a pipe", "endless"])
def test_a_strange_sweep_json_is_no_sweep(kind: str, tmp_path: Path):
    path = tmp_path / "sweep.json"
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
    assert read_record(tmp_path) == []
    with pytest.raises(ConfigError, match="without a run"):
        find_runs([str(tmp_path)])
