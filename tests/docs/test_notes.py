"""Pages of docs/: their code runs and their links point to files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

ROOT = Path(__file__).parent.parent.parent
NOTES = sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(note: Path, language: str) -> list[str]:
    return [code for named, code in CODE.findall(note.read_text()) if named == language]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "note", [note for note in NOTES if blocks(note, "python")], ids=lambda note: note.stem
)
def test_the_code_of_a_note_runs_from_top_to_bottom(note: Path, tmp_path, monkeypatch):
    for name in ("configs", "experiments"):
        # Another worker compiles to files of passing names there.
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace = {"__name__": note.stem}
    for code in blocks(note, "python"):
        line = note.read_text()[: note.read_text().index(code)].count("\n")
        exec(compile("\n" * line + code, note, "exec"), namespace)


DIVIDED = re.compile(r"devices=[1-9\[\"]")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "note",
    [note for note in NOTES if DIVIDED.search("".join(blocks(note, "python")))],
    ids=lambda note: note.stem,
)
def test_code_that_names_devices_runs_where_no_variable_divides_the_cpu(note: Path, tmp_path):
    plain = plain_environ()
    code = "".join(blocks(note, "python"))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=plain, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_links_point_to_files(note: Path):
    for target in LINK.findall(note.read_text()):
        assert (note.parent / target).exists(), f"{note.name} links to {target}, not a file"


def test_the_index_has_every_page_once():
    listed = LINK.findall((ROOT / "docs" / "README.md").read_text())
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in {".md", ".py"}}
    assert set(listed) >= pages - {"README.md"}
    assert len(listed) == len(set(listed))


def test_each_decision_has_question_figure_and_decision_in_four_lines():
    text = (ROOT / "docs" / "decisions.md").read_text()
    head, *entries = re.split(r"^## ", text, flags=re.MULTILINE)
    assert head.startswith("# Decisions")
    assert 0 < len(entries) <= 40
    for entry in entries:
        parts = [line.partition(".")[0] for line in entry.splitlines()[1:] if line]
        assert parts == ["- **Question", "- **Figure", "- **Decision"], entry[:60]
        assert re.search(r"\d", entry.split("**Figure.**")[1]), f"no number: {entry[:60]}"
