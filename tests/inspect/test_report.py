"""`jtrain report`: one self-contained page of a run, or of several, that may be damaged."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.inspect.report import read_run, render_page
from jtrain.inspect.report.page import metric_charts, summarize_run, thin
from jtrain.io.png import encode_png


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


def test_unreadable_rows_are_reported_and_the_others_read(tmp_path: Path):
    lines = [json.dumps(row) for row in ROWS]
    lines[1:1] = ["garbage", '{"loss": 3}', "[1]", '{"step": true}']
    story = read_run(
        write_run(tmp_path / "a", metrics_jsonl="\n".join([*lines, '{"step": 50, "lo']))
    )
    assert list(story.metrics) == ROWS
    rows = [line.split(" cannot")[0] for line in story.troubles]
    assert rows == [f"row {i} of metrics.jsonl" for i in (2, 3, 4, 5, 9)]


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


def test_training_and_validation_of_a_metric_share_a_chart_and_loss_comes_first(tmp_path: Path):
    rows = [{"step": 1, "accuracy": 0.5, "loss": 2.0}, {"step": 2, "valid/loss": "NaN"}]
    rows += [{"step": 3, "valid/loss": 1.0}]
    found = metric_charts([read_run(write_run(tmp_path / "a", rows))])
    assert list(found) == ["loss", "accuracy"]
    assert found["loss"] == {"loss": {1: 2.0}, "valid/loss": {3: 1.0}}


def test_thinning_keeps_peaks():
    points = {i: math.sin(i / 500) for i in range(10_000)} | {4321: 99.0}
    found = thin(points)
    assert len(found) <= 1200
    assert found[4321] == 99.0


EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


class Elements(HTMLParser):
    """Collector of a page's elements with their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path):
    text = render_page([read_run(write_run(tmp_path / "a", ROWS))])
    for tag, attributes in Elements(text).found:
        assert tag not in {"link", "iframe", "object", "embed", "base", "script"}
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


def test_several_runs_share_charts_and_differences_are_listed(tmp_path: Path):
    first = write_run(tmp_path / "a", ROWS)
    second = write_run(tmp_path / "b", ROWS[:2])
    (second / "config.yaml").write_text("experiment: toy\nname: b\noptimizer: {lr: 0.2, b1: 1}\n")
    text = render_page([read_run(first), read_run(second)])
    curves = text.partition("Curves")[2].partition("</svg>")[0]
    assert [len(x.split()) for x in re.findall(r'points="(.*?)"', curves)] == [4, 2]
    table = text.partition("What differs")[2].partition("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", table)
    assert [cells[i : i + 3] for i in range(0, len(cells), 3)] == [
        ["<code>name</code>", "a", "b"],
        ["<code>steps</code>", "40", "absent"],
        ["<code>optimizer.lr</code>", "0.1", "0.2"],
        ["<code>optimizer.b1</code>", "absent", "1"],
    ]


def test_curves_have_every_step_if_steps_are_recorded(tmp_path: Path):
    steps = [
        {"step": 2, "loss": [3.0, "NaN"], "grad_norm": [1.0, 2.0], "batch": [1, 2]},
        {"step": 7, "loss": [2.5] * 5, "grad_norm": [1.5] * 5, "batch": [1] * 5},
    ]
    text = "".join(json.dumps(row) + "\n" for row in steps)
    found = metric_charts([read_run(write_run(tmp_path / "a", ROWS, steps_jsonl=text))])
    assert found["loss"]["loss"] == {1: 3.0, **{i: 2.5 for i in range(3, 8)}}
    assert len(found["grad_norm"]["grad_norm"]) == 7
    assert "batch" not in found


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


def test_the_page_has_pictures(tmp_path: Path):
    path = write_run(tmp_path / "a", ROWS)
    picture = encode_png([[0, 255]])
    (path / "pictures").mkdir()
    (path / "pictures" / "digits-40.png").write_bytes(picture)
    text = render_page([read_run(path)])
    sources = [attributes["src"] for tag, attributes in Elements(text).found if tag == "img"]
    assert sources == [f"data:image/png;base64,{base64.b64encode(picture).decode()}"]


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


POINTS = [("lr=1e-2,seed=0", 0.3), ("lr=1e-2,seed=1", 0.5), ("lr=1e-3,seed=0", 0.1)]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for label, loss in reversed(POINTS):
        rows = [*ROWS, {"step": 40, "valid/loss": loss}]
        config = f"experiment: toy\nname: 'sw/{label}'\nsteps: 40\n"
        write_run(Path("runs/sw") / label, rows, config_yaml=config)
    write_run(Path("runs/alone"), ROWS)
    point = lambda label: dict(pair.split("=") for pair in label.split(","))
    members = [{"name": f"sw/{x}", "point": point(x), "settings": []} for x, _ in POINTS]
    Path("runs/sw/sweep.json").write_text(json.dumps({"members": members}))


@pytest.mark.usefixtures("sweep")
def test_the_command_writes_a_page_of_a_sweep_with_its_ranking(capsys):
    assert main(["report", "sw"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("runs/sw/report.html  ")
    assert said.err == ""
    text = Path("runs/sw/report.html").read_text()
    assert "<title>sw: 3 runs</title>" in text
    assert "Damaged" not in text
    assert [row[0] for row in cells(text)[1:]] == [f"sw/{label}" for label, _ in POINTS]
    ranking = text.partition("<h2>Ranking</h2>")[2].partition("</pre>")[0]
    lines = ranking.splitlines()
    assert lines[1].split()[:2] == ["1e-3", "0.1000"], "the best first"
    assert lines[2].split()[:4] == ["1e-2", "0.4000", "+-", "0.1414"]
