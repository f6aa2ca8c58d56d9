"""Mutated configs: a mistake is told or there is none, and nothing else ever happens.

2,000 by default; `JTRAIN_FUZZ=50000 python -m pytest -n 0 -m thorough
tests/bad_input/test_fuzzed_configs.py` draws as many others as it is told to.
"""
# ruff: noqa: SIM905  (words read best as words)

import contextlib
import os
import time
from pathlib import Path
from random import Random

import pytest
from toy_study import YAML, write_study

from jtrain.config.dump import dump
from jtrain.config.resolve import resolve
from jtrain.errors import UserError

COUNT = int(os.environ.get("JTRAIN_FUZZ", "2000"))
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
SCALARS = [*VALUES, "3 epochs", "!!int x", "&a 1", "{a: 1}", "9" * 400, "x" * 3000]
SIGNS = "ab1 \n\t:-[]{}#&*!|>'\"%@`,?~.\\u0\x07é"
KEYS = """steps batch seed name experiment base optimizer optimizer.kind optimizer.lr model
    model.layers optimizer.schedule.warmup model.scales.a model.title checkpoint.every
    __class__ a.b.c log evaluate.sets.valid.every""".split()


def signs(draw: Random) -> str:
    return "".join(draw.choices(SIGNS, k=draw.randint(0, 12)))


def edited(draw: Random, line: str) -> list[str]:
    """Return the lines to have in place of `line`."""
    at = draw.randint(0, len(line))
    return draw.choice(
        [
            [],
            [draw.choice(LINES), line],
            [line, line],
            [f"{line.partition(':')[0]}: {draw.choice(SCALARS)}"],
            [" " * draw.randint(0, 5) + line.strip()],
            [line[:at] + signs(draw) + line[at:]],
            [line[:at] + line[at + 1 :]],
            [f"{draw.choice(KEYS).split('.')[-1]}: {draw.choice(SCALARS)}", line],
        ]
    )


def mutated(draw: Random) -> bytes:
    """Return a good config with a few edits: of lines, of values, of single characters."""
    lines = draw.choice([YAML, GOOD]).splitlines()
    for _ in range(draw.randint(0, 3)):
        place = draw.randrange(len(lines))
        lines[place : place + 1] = edited(draw, lines[place])
    data = bytearray("\n".join(lines).encode())
    if draw.random() < 0.1:
        data[draw.randrange(len(data))] = draw.randrange(256)  # a byte that is none of the text
    return bytes(data)


def typed(draw: Random) -> list[str]:
    key = draw.choice([draw.choice(KEYS), signs(draw)])
    return draw.choice([[], [f"{key}={draw.choice([draw.choice(SCALARS), signs(draw)])}"]])


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
    for seed in range(COUNT):
        draw = Random(seed)
        path.write_bytes(mutated(draw))
        begun = time.thread_time()
        found = None
        with contextlib.suppress(UserError):
            found = resolve(path, typed(draw)).config
        spent = time.thread_time() - begun
        slowest = max(slowest, spent)
        assert spent < 2, seed
        seen["told" if found is None else "fine"] += 1
        if found is not None and seen["fine"] % 20 == 0:
            path.write_text(dump(found))
            assert resolve(path).config == found, seed
    assert names(path.parents[1]) == before
    assert seen["told"] > COUNT / 10
    assert seen["fine"] > COUNT / 50, "mutations that change nothing of the meaning are there too"
    print(f"{COUNT} configs: {seen}, the slowest took {slowest:.2f} s")
