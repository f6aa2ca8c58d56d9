"""argcomplete completes verbs, options, configs, keys and their values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("jtrain sh", ["show "]),
        ("jtrain run configs/dig", ["configs/digits.yaml "]),
        ("jtrain run digits --fa", ["--fast "]),
        ("jtrain run digits optimizer.l", ["optimizer.lr="]),
        ("jtrain check digits parallel.kind=fs", ["parallel.kind=fsdp "]),
        ("jtrain ckpt rm x --dam", ["--damaged "]),
        ("jtrain launch --processes 2 ru", ["run "]),
        ("jtrain eval --st", ["--step "]),
        ("jtrain run no.yaml key", []),
    ],
)
@pytest.mark.thorough
def test_the_words_that_may_follow(line: str, some: list[str]):
    """Ask as argcomplete's script for bash does: the answer comes through descriptor 8."""
    given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    env = {**os.environ, **given, "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    script = f'exec 8>&{write}; exec "$0" -m jtrain'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=ROOT, env=env, pass_fds=[write], timeout=300
    )
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read().split("\n") == (some or [""])
    assert done.returncode == 0
