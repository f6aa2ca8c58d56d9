"""docs/tensorflow.md: both sides of each row give the same `result`, and the page has each row."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import assert_close
from plain_environ import plain_environ, run_python
from tensorflow_rows import NUMBERS, PAGE, PROGRAMS, Row, plain, rows

SHARED, *ROWS = rows()
RECORDED = json.loads(NUMBERS.read_text())
ALTERNATIVES = {"jt.fit", "jt.row_keys", "jax.jacrev", "jax.lax.cond"}  # which a row names besides
TOLERANCE = 1e-6  # of the largest number of an array: float32 sums, in another order


@functools.cache
def _start() -> Mapping[str, Any]:
    namespace: dict[str, Any] = {"__name__": "tensorflow_page"}
    exec(compile("\n" * SHARED.line + SHARED.ours, PROGRAMS, "exec"), namespace)
    return namespace


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_jtrain_gives_the_numbers_of_tensorflow(row: Row, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = _start()
    namespace = dict(start)
    exec(compile("\n" * row.line + row.ours, PROGRAMS, "exec"), namespace)
    moved = [name for name in start if namespace[name] is not start[name]]
    assert not moved, f"the row changes what later rows of the page use: {moved}"
    if row.runs:
        compare(row.name, plain(namespace["result"]), RECORDED["results"][row.name])


def test_the_page_has_each_row_with_names_that_its_program_uses():
    cells = re.findall(r"^\| (\w.*?) \| .* \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in cells] == [row.name for row in ROWS]
    for (name, ours), row in zip(cells, ROWS, strict=True):
        called = re.findall(r"(?:jt|jax)\.[\w.]*\w", " ".join(re.findall(r"`([^`]+)`", ours)))
        assert {each for each in called if each not in row.ours} <= ALTERNATIVES, name


def test_the_record_is_of_the_rows_that_tensorflow_runs():
    assert list(RECORDED["results"]) == [row.name for row in ROWS if row.runs]
    version = RECORDED["tensorflow"].rpartition(".")[0]
    assert f"TensorFlow {version}" in PAGE.read_text()


@pytest.mark.slow
def test_tensorflow_gives_the_numbers_that_are_recorded(tmp_path: Path):
    pytest.importorskip("tensorflow", reason="needs the extra `tensorflow`")
    script = Path(__file__).parent / "tensorflow_rows.py"
    env = plain_environ() | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    run_python(script, tmp_path / "numbers.json", cwd=tmp_path, env=env)
    found = json.loads((tmp_path / "numbers.json").read_text())["results"]
    assert found.keys() == RECORDED["results"].keys()
    for name, result in found.items():
        compare(name, result, RECORDED["results"][name])


def compare(name: str, found: Any, expected: Any) -> None:
    """Compare results: numbers to the tolerance, everything else exactly."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            compare(f"{name}: {key}", found[key], value)
    elif _is_numeric(expected):
        assert np.shape(found) == np.shape(expected), name
        assert_close(found, expected, TOLERANCE, says=name)
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for i, value in enumerate(expected):
            compare(f"{name}: {i}", found[i], value)
    else:
        assert found == expected, name


def _is_numeric(value: Any) -> bool:
    """Return whether a value is a number, or nested lists of the shape of an array."""
    try:
        return np.asarray(value).dtype.kind in "iuf"
    except ValueError:  # lists of different lengths
        return False
