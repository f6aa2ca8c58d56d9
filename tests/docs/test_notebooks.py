"""Notebooks and the code of pages run; their links and names exist, and all names are public."""

import importlib
import inspect
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plain_environ import run_python
from quick_study import at_home

import jtrain
from jtrain.cli import main
from jtrain.train.hooks.log import read_results

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> Sequence[Mapping[str, Any]]:
    return [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


def test_they_are_stored_without_outputs():
    for cell in (cell for notebook in NOTEBOOKS for cell in code_cells(notebook)):
        assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear all outputs"


def test_each_begins_with_the_same_cell_and_the_readme_lists_it():
    assert len(NOTEBOOKS) == 3
    assert len({tuple(code_cells(notebook)[0]["source"]) for notebook in NOTEBOOKS}) == 1
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (ROOT / "notebooks" / "README.md").read_text())
    assert sorted(listed) == [notebook.name for notebook in NOTEBOOKS]


@pytest.fixture
def ran(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the notebook after a kernel ran it in an empty folder, without a network."""
    nbclient = pytest.importorskip("nbclient", reason="pip install 'jtrain[notebooks]'")
    pytest.importorskip("ipykernel", reason="pip install 'jtrain[notebooks]'")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # everything is installed, and pip finds it so
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # and its own devices
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    book = nbformat.read(notebook, 4)
    folder = tmp_path / "folder"
    folder.mkdir()
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=600, startup_timeout=300, resources=resources).execute()
    return book


def texts(book: Any) -> str:
    """Return the text of all streams, as a cell shows it."""
    streams = [out.text for c in book.cells for out in c.get("outputs", ()) if "text" in out]
    return re.sub(r"\x1b\[[0-9;?]*\w", "", "".join(streams))


def displays(book: Any) -> Sequence[str]:
    """Return the HTML of all displays and results."""
    outputs = [out for c in book.cells for out in c.get("outputs", ()) if "data" in out]
    return [out.data["text/html"] for out in outputs if "text/html" in out.data]


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", [ROOT / "notebooks/first_steps.ipynb"], ids=["first_steps"])
def test_first_steps_draws_its_losses_and_finds_the_quantiles(ran):
    live = [page for page in displays(ran) if "600/600" in page or "1500/1500" in page]
    assert len(live) == 2, "one display a training, which is replaced while it trains"
    assert all("valid" in page for page in live)
    share = re.search(r"([\d.]+)% of the new points", texts(ran))
    assert share
    assert 70 < float(share[1]) < 90


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", [ROOT / "notebooks" / "runs.ipynb"], ids=["runs"])
def test_runs_resumes_a_killed_run_to_the_same_bits(ran):
    said = texts(ran)
    assert "ended with -9" in said
    assert re.search(r"resumes from step [1-5]00 of 600", said)
    assert "every parameter has the same bits: True" in said
    assert "the metrics files are equal: True" in said
    assert any("600/600" in page for page in displays(ran))
    assert any("<iframe" in page for page in displays(ran))


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", [ROOT / "notebooks/eight_devices.ipynb"], ids=["devices"])
def test_eight_devices_have_one_result(ran):
    rows = re.findall(r"(?m)^(\w.*?)  +([\d.]+) +(\S+e\S+) +(\S+e\S+)   (.*)$", texts(ran))
    assert len(rows) == 11
    assert {part for *_, part in rows} == {"16 x 64", "2 x 64", "16 x 16", "8 x 32"}
    for _, loss, of_losses, of_params, _ in rows:
        assert float(loss) < 0.45  # the variance of what it learns is 0.5
        assert max(float(of_losses), float(of_params)) < 1e-5


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


REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
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
(RING, _), (VALUES,) = blocks(EXPERIMENT, "python"), blocks(EXPERIMENT, "yaml")


@pytest.mark.thorough
def test_it_trains_to_what_the_note_says(tmp_path: Path, monkeypatch, compiled: Path):
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


USERS = ("experiments", "docs", "notebooks", "README.md", "jtrain/cli/project_template")
DEEP = re.compile(r"\b(?:from|import) jtrain\.\w+\.\w.*")


def test_no_page_and_no_experiment_imports_an_inner_module():
    files = [path for user in USERS for path in [ROOT / user, *(ROOT / user).rglob("*")]]
    files = [path for path in files if path.suffix in {".md", ".py", ".txt", ".ipynb"}]
    assert len(files) > 60
    found = {str(path.relative_to(ROOT)): DEEP.findall(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}
