"""The import order of the package, its rooms, and one way to judge what is near."""

import ast
import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close

# A package may import those of the lines above it. Those of one line do not import one another.
ORDER = [
    {"errors"},
    {"core", "io"},
    {"types"},
    {"config", "distributed"},
    {"data", "losses", "parallel"},
    {"models", "optim"},
    {"checkpoint", "finetune"},
    {"train"},
    {"inspect", "server", "sweep"},
    {"testing"},
    {"cli"},
    {"__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jtrain").rglob("*.py"))

# What only one part of the house may import or say, and what to do instead.
OWNERS = {
    "flax": ({"models"}, "Models are the only flax code; give the spine a Model(init, apply)."),
    "orbax": ({"checkpoint"}, "Call jtrain.checkpoint; it hides the storage library."),
    "grain": ({"data"}, "Wrap it as a source in jtrain/data."),
    "ruamel": ({"config"}, "Read and write YAML by jtrain.config."),
}
SHARDING = {"Mesh", "PartitionSpec", "NamedSharding", "psum", "pmap", "shard_map"}


parsed = functools.cache(lambda path: ast.parse(path.read_text()))


def part(path: Path) -> str:
    return path.relative_to(ROOT / "jtrain").parts[0].removesuffix(".py")


def files_of(name: str) -> list[Path]:
    """Return the modules of a package, or the module itself."""
    found = [path for path in FILES if part(path) == name]
    assert found, f"jtrain/{name} has no file"
    return found


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports relatively; write the full name."
            if node.module == "jtrain":
                found += [(node.lineno, f"jtrain.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return found


def test_imports_only_go_up():
    for name in sorted(RANK):
        for path in files_of(name):
            check_imports(name, path)


def check_imports(here: str, path: Path) -> None:
    where = path.relative_to(ROOT)
    for line, there in imports(parsed(path)):
        top, _, rest = there.partition(".")
        if top == "jtrain":
            there = rest.split(".")[0]
            assert there == here or RANK[there] < RANK[here], (
                f"{where}:{line} imports jtrain.{there}, which comes later in the flow or stands "
                f"beside it. Pass the value in, or move what both need up to jtrain/core/types.py."
            )
        assert top != "jax" or "_src" not in there, f"{where}:{line} imports a private JAX module."
        assert here != "data" or top not in {"jax", "jaxtyping", "optax"}, (
            f"{where}:{line}: jtrain/data is numpy only, so that reading workers start fast."
        )
        if top in OWNERS:
            owners, advice = OWNERS[top]
            assert here in owners, f"{where}:{line} imports {top}. {advice}"


def test_only_parallel_says_how_arrays_are_laid_out():
    for name in sorted(RANK.keys() - {"parallel"}):
        for path in files_of(name):
            if PIECES not in path.parents:  # programs of their own, which import nothing of jtrain
                check_layout(path)


PIECES = ROOT / "jtrain" / "inspect" / "eject" / "pieces"


def test_pieces_of_ejected_files_need_jax_optax_and_numpy_alone():
    allowed = {"jax", "optax", "numpy", *sys.stdlib_module_names}
    for path in PIECES.glob("*.py"):
        for _, name in imports(parsed(path)):
            own = name.startswith("jtrain.inspect.eject.pieces.")
            assert own or name.partition(".")[0] in allowed, f"{path.name} imports {name}"


def check_layout(path: Path) -> None:
    for node in ast.walk(parsed(path)):
        name = getattr(node, "attr", None) or (
            node.name if isinstance(node, ast.alias) else getattr(node, "id", None)
        )
        if name == "psum" and not isinstance(node, ast.alias):
            dotted = isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("lax")
            assert not dotted, f"{path}:{node.lineno}: take `psum` as an argument."
            continue
        assert name not in SHARDING, (
            f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')} says {name}. Only "
            f"jtrain/parallel lays arrays out: take a Placement or a Strategy as an argument."
        )


# What shows that a module walks the equations of a traced program.
WALKS = re.compile(r'\.eqns\b|params\["(\w*jaxpr|branches)"\]|hasattr\(\w+, "(eqns|jaxpr)"\)')


def test_only_the_interpreter_reads_the_equations_of_a_program():
    for path in FILES:
        found = WALKS.search(path.read_text())
        assert found is None or path == ROOT / "jtrain" / "core" / "interpret.py", (
            f"{path.relative_to(ROOT)} says {found[0]}. Subclass Interpreter of "
            f"jtrain/core/interpret.py, or read its equations_in(program)."
        )


def test_no_grab_bags():
    for path in FILES:
        assert path.stem not in {"utils", "util", "helpers", "common", "misc"}, (
            f"{path}: name the file for what it does."
        )


def test_every_part_has_a_place():
    unknown = {part(path) for path in FILES} - set(RANK)
    assert not unknown, f"{unknown}: add it to ORDER in tests/test_layers.py, above what uses it."


def test_no_two_test_files_share_a_name():
    """Or pytest refuses the second one in a clean checkout."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_core_is_made_of_jax_and_optax_alone():
    allowed = {"jax", "optax", "numpy", "jaxtyping", "jtrain"}
    for path in FILES:
        if part(path) == "core":
            used = {there.partition(".")[0] for _, there in imports(parsed(path))}
            other = used - allowed - set(sys.stdlib_module_names)
            assert not other, f"{path.relative_to(ROOT)} imports {other}; everybody reads core"


TESTS = Path(__file__).parent
# numpy's own comparisons take an element's own size, or a number of digits.
REFUSED = {
    *("assert_allclose", "assert_almost_equal", "assert_approx_equal"),
    *("assert_array_almost_equal", "allclose", "isclose"),
}


def test_one_element_that_is_wrong_is_seen():
    want = np.linspace(-1, 1, 1000)
    assert_close(want + 1e-7, want, 1e-6)
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 1000"):
        assert_close(want + 1e-5 * (np.arange(1000) == 3), want, 1e-6)


def test_no_test_compares_by_the_size_of_an_element():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == "comparison.py":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr in REFUSED:
                found.append(f"{path.relative_to(TESTS)}:{node.lineno} {node.attr}")
    assert not found, (
        f"{', '.join(found)}: an element may be the remainder of a cancellation, whose rounding "
        "another processor's order of sums changes. Write `assert_close(got, want, within)` or "
        "`distance(got, want) < within` from tests/comparison.py."
    )
