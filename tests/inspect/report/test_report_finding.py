"""A report finds the runs of a sweep, of a folder and of a shell glob."""

import errno
import json
from pathlib import Path

import pytest
from test_report_page import cells, data_of
from test_report_reading import ROWS, write_run

from jtrain.cli import main, page_file
from jtrain.errors import ConfigError
from jtrain.inspect.report.find_runs import find_runs

POINTS = [("lr=1e-2,seed=0", 0.3), ("lr=1e-2,seed=1", 0.5), ("lr=1e-3,seed=0", 0.1)]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for label, loss in reversed(POINTS):
        rows = [*ROWS, {"step": 40, "valid/loss": loss}]
        config = f"experiment: toy\nname: 'sw/{label}'\nsteps: 40\n"
        write_run(Path("runs/sw") / label, rows, config_yaml=config)
    write_run(Path("runs/alone"), ROWS)
    point = lambda label: dict(pair.split("=") for pair in label.split(","))
    members = [{"name": f"sw/{x}", "point": point(x), "settings": []} for x, _ in POINTS]
    Path("runs/sw/sweep.json").write_text(json.dumps({"members": members}))


def named(found) -> list[str]:
    return [run.name for run in found.runs]


def test_a_sweep_gives_its_runs_in_order():
    found = find_runs(["sw"])
    assert named(found) == [label for label, _ in POINTS]
    assert (found.folder, found.skipped) == (Path("runs/sw"), [])


def test_a_folder_gives_all_its_runs():
    found = find_runs(["runs"])
    assert named(found) == ["alone", *(label for label, _ in POINTS)]
    assert found.folder == Path("runs")


def test_a_glob_skips_files_and_repeats_no_run():
    found = find_runs([*map(str, sorted(Path("runs/sw").iterdir())), "sw", "alone"])
    assert named(found) == [*sorted(label for label, _ in POINTS), "alone"]
    assert found.folder is None
    assert found.skipped == ["runs/sw/sweep.json is a file, and is skipped"]


def test_a_link_out_of_a_folder_is_not_followed(tmp_path_factory: pytest.TempPathFactory):
    elsewhere = write_run(tmp_path_factory.mktemp("elsewhere") / "b", ROWS)
    Path("runs/sw/link").symlink_to(elsewhere)
    assert named(find_runs(["sw"])) == [label for label, _ in POINTS]


@pytest.mark.parametrize("record", ["", "[", "[]", '{"members": 3}', '{"members": [{}]}'])
def test_an_unreadable_sweep_file_loses_only_the_order(record: str, capsys):
    Path("runs/sw/sweep.json").write_text(record)
    assert named(find_runs(["sw"])) == sorted(label for label, _ in POINTS)
    assert main(["report", "sw"]) == 0


def test_the_command_writes_a_page_of_a_sweep_with_its_ranking(capsys):
    assert main(["report", "sw"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("runs/sw/report.html  ")
    assert said.err == ""
    text = Path("runs/sw/report.html").read_text()
    assert "<title>sw: 3 runs</title>" in text
    assert "Damaged" not in text
    assert data_of(text)["runs"] == [f"sw/{label}" for label, _ in POINTS]
    assert len(cells(text)) == 4
    ranking = text.partition("<h2>Ranking</h2>")[2].partition("</pre>")[0]
    lines = ranking.splitlines()
    assert lines[1].split()[:2] == ["1e-3", "0.1000"], "the best first"
    assert lines[2].split()[:4] == ["1e-2", "0.4000", "+-", "0.1414"]


def test_the_command_accepts_a_glob_that_includes_its_page(capsys):
    assert main(["report", "sw"]) == 0
    capsys.readouterr()
    assert main(["report", *map(str, sorted(Path("runs/sw").iterdir()))]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("report.html  ")
    assert said.err.splitlines()[0] == "runs/sw/report.html is a file, and is skipped"


def test_a_page_on_a_read_only_disk_is_advised_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(page_file, "atomic_write", refuse)
    assert main(["report", "sw"]) == 2
    advice = "(Read-only file system); name a file elsewhere: --out "
    assert f"runs/sw/report.html cannot be written {advice}" in (said := capsys.readouterr().err)
    folder = "~" if tmp_path.is_relative_to("/tmp") else "/tmp"
    assert said.endswith(f"{advice}{folder}/report.html\n")


def test_an_unknown_word_raises():
    with pytest.raises(
        ConfigError, match=r"nothing is not a directory. Available in runs/: alone, sw"
    ):
        find_runs(["sw", "nothing"])
