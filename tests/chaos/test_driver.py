"""The chaos driver resumes where it was stopped, adds results up, and writes a table."""

from pathlib import Path

import pytest

from chaos import __main__ as driver
from chaos import board
from chaos.results import Results, spans
from chaos.rows import Row
from chaos.trial import Trial

MADE: list[tuple[str, int]] = []


def make_trial_function(name: str, passes: bool = True):
    def trial(seed: int, folder: Path) -> Trial:
        MADE.append((name, seed))
        if name == "raises":
            raise ValueError("no disk")
        return Trial(name, seed, passes or seed != 3, 0.25, "found | so")

    return trial


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Row]:
    MADE.clear()
    rows = {
        "one": Row("one holds", "never", make_trial_function("one"), trials=4, faults=10),
        "other": Row(
            "other holds", "", make_trial_function("other", False), trials=lambda folder: 2
        ),
    }
    monkeypatch.setattr(driver, "ROWS", rows)
    return rows


def run(folder: Path, *words: object) -> int:
    return driver.main([*map(str, words), "--folder", str(folder)])


def test_a_full_run_resumes_where_it_was_stopped(tmp_path: Path):
    assert run(tmp_path, "--full", "--only", "one", "--trials", 2) == 0
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes() + b'{"trial": {"na')  # a kill tore the last line
    MADE.clear()
    assert run(tmp_path, "--full") == 0
    assert sorted(MADE) == [("one", 3), ("one", 4), ("other", 1), ("other", 2)]
    assert run(tmp_path, "--full", "--seed", 3) == 70, "the third of the other row fails"
    assert sorted(Results(path).of("one")) == [1, 2, 3, 4, 5, 6]
    MADE.clear()
    assert run(tmp_path, "--failed") == 70
    assert MADE == [("other", 3)]


def test_a_trial_is_repeated_by_its_seed_without_a_result(tmp_path: Path, capsys):
    assert run(tmp_path, "--only", "other", "--seed", 3) == 70
    assert capsys.readouterr().out == "other seed 3: FAILED in 0.2 s: found | so\n"
    assert not (tmp_path / "results.jsonl").exists()


def test_a_trial_that_raises_has_failed(tmp_path: Path):
    trial = driver.run_trial(
        "raises", Row("", "", make_trial_function("raises"), trials=1), 7, tmp_path
    )
    assert (trial.passed, trial.seed, trial.detail) == (False, 7, "ValueError: no disk")


def test_the_page_has_all_results_including_failures(tmp_path: Path, rows):
    page = tmp_path / "page.md"
    page.write_text(f"# Words\n\n{board.BEGIN}\nWHAT WAS\n{board.END}\n\nMore words.\n")
    run(tmp_path, "--full", "--trials", 3, "--board", page)
    text = page.read_text()
    assert "| one holds (`one`) | 30 of 30 so far (of 40) | never | 0.2 | 1-3 |" in text
    assert "| other holds (`other`) | 2 of 3 | - | 0.2 | 1-3 |" in text
    assert "- `other` seed 3, " in text
    assert "not mended: found \\| so" in text
    assert "WHAT WAS" not in text
    assert text.startswith("# Words")
    assert text.endswith("More words.\n")
    results = Results(tmp_path / "results.jsonl")
    results.append(Trial("other", 3, True, 0.5, ""))
    board.write(page, rows, results, tmp_path)
    assert "| 3 of 3 | -" in page.read_text()
    assert "mended since: found" in page.read_text()


def test_spans_are_short():
    assert spans([3, 1, 2, 7]) == "1-3, 7"
    assert spans([]) == ""
