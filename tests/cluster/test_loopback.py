"""Who starts JAX in several processes says where it listens: without that it is everywhere."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_call_says_where_it_listens():
    found = 0
    for folder in ("jtrain", "tests", "benchmarks", "experiments"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                if ast.unparse(node.func).endswith("distributed.initialize"):
                    found += 1
                    said = {word.arg for word in node.keywords}
                    assert "coordinator_bind_address" in said, f"{file}:{node.lineno}"
    assert found >= 4
