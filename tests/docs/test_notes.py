"""Pages of docs/: their code runs, and their links and names exist."""

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
from plain_environ import run_python
from quick_study import at_home

import jtrain
from jtrain.cli import main
from jtrain.train.hooks.log import read_results

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
    run_python("-W", "error", "-c", "".join(blocks(note, "python")), cwd=tmp_path)


def test_links_point_to_files():
    pages = [*NOTES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md"))]
    links = [(page, target) for page in pages for target in LINK.findall(page.read_text())]
    lost = [f"{page.name}: {to}" for page, to in links if not (page.parent / to).exists()]
    assert not lost


def test_the_index_has_every_page_once():
    listed = LINK.findall((ROOT / "docs" / "README.md").read_text())
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in {".md", ".py"}}
    assert set(listed) >= pages - {"README.md"}
    assert len(listed) == len(set(listed))


REFERENCE = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
NAMED = re.compile(r"^::: (jtrain[\w.]*)$", re.MULTILINE)


def exists(path: str) -> bool:
    """Return whether a dotted path is a module, or an attribute of one."""
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), name)
    return True


def test_the_reference_names_what_exists_and_every_public_name():
    named = {path for page in REFERENCE for path in NAMED.findall(page.read_text())}
    assert [path for path in sorted(named) if not exists(path)] == []
    public = {f"jtrain.{name}" for name, value in inspect.getmembers(jtrain) if callable(value)}
    assert public - named == set()


EXPERIMENT = ROOT / "docs" / "experiments.md"
(RING,), (VALUES,) = blocks(EXPERIMENT, "python"), blocks(EXPERIMENT, "yaml")


@pytest.mark.thorough
def test_it_trains_to_what_the_note_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path
):
    for path, text in {"experiments/ring.py": RING, "configs/ring.yaml": VALUES}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text, encoding="utf-8")
    at_home(tmp_path, monkeypatch, compiled)
    assert main(["run", "configs/ring.yaml"]) == 0
    assert read_results(Path("runs/ring/metrics.jsonl"), "valid")[1000]["accuracy"] > 0.97
    assert main(["run", "configs/ring.yaml", "model.widht=[8]"]) == 2
    assert main(["run", "configs/ring.yaml", "name=four", "microbatches=4", "steps=500"]) == 0


@pytest.mark.thorough
def test_what_is_rebuilt_from_jax_alone_equals_jtrain():
    lines = run_python("-W", "error", "docs/from_scratch.py", cwd=ROOT).stdout.splitlines()
    far = {line.split()[0]: float(line.split()[-2]) for line in lines if line.endswith(" away")}
    assert far.keys() == {"microbatches", "shard_map", "fsdp"}
    assert max(far.values()) < 1e-6
    assert lines[-1].startswith("evaluation")
