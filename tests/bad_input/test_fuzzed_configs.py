"""Mutated configs: a mistake is told or there is none, and nothing else ever happens.

2,000 by default; `JTRAIN_FUZZ=50000 python -m pytest -n 0 -m thorough
tests/bad_input/test_fuzzed_configs.py` draws as many others as it is told to.
"""
# ruff: noqa: SIM905  (words read best as words)

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toy_study import YAML, write_study

from jtrain.config.dump import dump
from jtrain.config.resolve import resolve
from jtrain.errors import UserError

COUNT = int(os.environ.get("JTRAIN_FUZZ", "2000"))
FUZZ = settings(
    max_examples=COUNT,
    derandomize=COUNT == 2000,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # what fails is small as it is
    suppress_health_check=list(HealthCheck),
)
GOOD = (
    YAML
    + """model:
  width: 64
  layers: [1, 2]
  scales: {a: 1.5}
  title: 'a text'
evaluate: {every: 5, sets: {valid: {every: 5}}}
seed: 3
name: a/b
"""
)
LINES = """# a comment
checkpoint: {every: 10%, best: lowest loss}
microbatches: 2
base: other.yaml
init_from: {path: x, rename: [[a/*, b/*]]}
  schedule:
    kind: cosine
---
...
%YAML 1.2
steps_per_call: 5""".splitlines()
VALUES = """1 -1 0 1e-3 .inf .nan 1e999 0x10 0o7 012 1_000 true no null ~ '' toy ../x 3_epochs 10%
*a &a 2026-11-22 !!int !!python/name:os.system ${x} [*a] {a:1} [] | > ? <<: \u2028""".split()
SCALARS = st.sampled_from([*VALUES, "3 epochs", "!!int x", "&a 1", "{a: 1}", "9" * 400, "x" * 3000])
SIGNS = st.text(alphabet="ab1 \n\t:-[]{}#&*!|>'\"%@`,?~.\\u0\x07é", max_size=12)
KEYS = st.sampled_from(
    """steps batch seed name experiment base optimizer optimizer.kind optimizer.lr model
    model.layers optimizer.schedule.warmup model.scales.a model.title checkpoint.every
    __class__ a.b.c log evaluate.sets.valid.every""".split()
)


@st.composite
def configs(draw) -> bytes:
    """Return a good config with a few edits: of lines, of values, of single characters."""
    lines = list(draw(st.sampled_from([YAML, GOOD])).splitlines())
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(len(lines) - 1, 0)))
        line = lines[place] if lines else ""
        match draw(st.integers(0, 7)):
            case 0:
                lines[place : place + 1] = []
            case 1:
                lines.insert(place, draw(st.sampled_from(LINES)))
            case 2:
                lines.insert(place, line)
            case 3:
                lines[place : place + 1] = [f"{line.partition(':')[0]}: {draw(SCALARS)}"]
            case 4:
                lines[place : place + 1] = [" " * draw(st.integers(0, 5)) + line.strip()]
            case 5:
                at = draw(st.integers(0, len(line)))
                lines[place : place + 1] = [line[:at] + draw(SIGNS) + line[at:]]
            case 6:
                at = draw(st.integers(0, len(line)))
                lines[place : place + 1] = [line[:at] + line[at + 1 :]]
            case _:
                lines.insert(place, f"{draw(KEYS).split('.')[-1]}: {draw(SCALARS)}")
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0 and data:  # a byte that is none of the text
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    return data


TYPED = st.lists(st.tuples(KEYS | SIGNS, SCALARS | SIGNS).map("=".join), max_size=1)


@pytest.fixture(name="path")
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = write_study(tmp_path)
    path.with_name("other.yaml").write_text(YAML)
    resolve(path)
    return path


def names(directory: Path) -> list[str]:
    return sorted(p.as_posix() for p in directory.rglob("*") if "__pycache__" not in p.parts)


@pytest.mark.thorough
def test_no_mutated_config_is_a_fault(path: Path):
    """Check that each config fails within two seconds of work, or resolves and reads back."""
    seen = {"told": 0, "fine": 0}
    before, slowest = names(path.parents[1]), 0.0

    @FUZZ
    @given(configs(), TYPED)
    def tried(data: bytes, words: list[str]) -> None:
        nonlocal slowest
        path.write_bytes(data)
        begun = time.thread_time()
        found = None
        with contextlib.suppress(UserError):
            found = resolve(path, words).config
        spent = time.thread_time() - begun
        slowest = max(slowest, spent)
        assert spent < 2
        seen["told" if found is None else "fine"] += 1
        if found is not None and seen["fine"] % 20 == 0:
            path.write_text(dump(found))
            assert resolve(path).config == found

    tried()
    assert names(path.parents[1]) == before
    assert seen["told"] > COUNT / 10
    assert seen["fine"] > COUNT / 50, "mutations that change nothing of the meaning are there too"
    print(f"{COUNT} configs: {seen}, the slowest took {slowest:.2f} s")
