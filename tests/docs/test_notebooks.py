"""The notebooks: run from top to bottom by a kernel, and stored without outputs."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

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
@pytest.mark.parametrize(
    "notebook", [ROOT / "notebooks" / "first_steps.ipynb"], ids=["first_steps"]
)
def test_first_steps_draws_its_losses_and_finds_the_quantiles(ran):
    live = [page for page in displays(ran) if "600/600" in page or "1500/1500" in page]
    assert len(live) == 2, "one display a training, which is replaced while it trains"
    assert all("<svg" in page and "valid" in page for page in live)
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
    assert any("600/600" in page and "<svg" in page for page in displays(ran))
    assert any("<iframe" in page for page in displays(ran))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "notebook", [ROOT / "notebooks" / "eight_devices.ipynb"], ids=["eight_devices"]
)
def test_eight_devices_have_one_result(ran):
    rows = re.findall(
        r"^(\w.*?)  +([\d.]+) +(\S+e\S+) +(\S+e\S+)   (.*)$", texts(ran), re.MULTILINE
    )
    assert len(rows) == 11
    assert {part for *_, part in rows} == {"16 x 64", "2 x 64", "16 x 16", "8 x 32"}
    for _, loss, of_losses, of_params, _ in rows:
        assert float(loss) < 0.45  # the variance of what it learns is 0.5
        assert max(float(of_losses), float(of_params)) < 1e-5
