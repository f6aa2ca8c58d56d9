"""Promises of SECURITY.md: no data runs as code, no test needs a network, packages are locked."""

import ast
import re
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jtrain").rglob("*.py"))
LOCKS = sorted((ROOT / "requirements").glob("ci-*.txt"))
TEXT = (ROOT / "SECURITY.md").read_text()
PROMISES = TEXT.split("\n## What is promised")[1].split("\n## ")[0]

# Functions that unpickle or run what they read. `np.load` is checked by its argument.
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code",
    "codeop", "runpy", "imp", "jax.experimental.serialize_executable",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}  # builtins, by their bare names
METHODS = {
    "torch.load", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "os.system",
    "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "jax.experimental.serialize_executable",
}  # fmt: skip
ENDS = {name.rpartition(".")[2] for name in METHODS}
# A module without any of these words has no finding.
WORDS = re.compile(
    r"pickle|dill|joblib|marshal|shelve|\bcode\b|codeop|runpy|\bimp\b|serialize_executable|eval\(|"
    r"exec\(|\bcompile\(|__import__|load|os\.(system|popen)|getoutput|getstatus|shell|trust_remote"
)
# File and call; SECURITY.md has the justification.
EXEMPT = {
    ("jtrain/parallel/program_cache.py", "jax.experimental.serialize_executable"),
    ("jtrain/data/batches/process_workers.py", "cloudpickle"),
    ("jtrain/data/batches/process_workers.py", "pickle"),
}


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the forbidden calls and imports of a module: line and name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [node.module or "", *whole]
            names = [name for name in names if name in MODULES | METHODS or _under(name)][:1]
        elif isinstance(node, ast.Call):
            names = list(_calls(node))
        elif isinstance(node, ast.Attribute):
            names = [said] if node.attr in ENDS and (said := ast.unparse(node)) in METHODS else []
        else:
            continue
        yield from ((node.lineno, n) for n in names if n in MODULES | CALLS | METHODS or _under(n))


def _under(name: str) -> bool:
    """Return whether a name is a module below a forbidden one, or a call of it."""
    return name.split(".")[0] in MODULES or "=" in name


def _calls(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    if isinstance(node.func, ast.Name) and called in CALLS:
        yield called
    for keyword in node.keywords:
        said = f"{keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg in {"allow_pickle", "shell"} and said.endswith("=False"):
            continue
        if keyword.arg in {"allow_pickle", "shell", "trust_remote_code"}:
            yield said
    imports = called.endswith(("import_module", "needed"))
    if imports and node.args and isinstance(node.args[0], ast.Constant):
        name = str(node.args[0].value)
        if name in MODULES or name.split(".")[0] in MODULES:
            yield name


def test_no_module_runs_data():
    assert FILES
    found = [
        f"{here}:{line} uses {name}"
        for path in FILES
        for here in [path.relative_to(ROOT).as_posix()]
        if WORDS.search(text := path.read_text())
        for line, name in findings(text)
        if (here, name) not in EXEMPT
    ]
    assert not found, (
        f"{found}, by which a file can run code. Read data by json, numpy without pickle, "
        f"safetensors or YAML nodes; see SECURITY.md."
    )


def test_each_exemption_is_needed_and_documented():
    for path, name in EXEMPT:
        assert name in {found for _, found in findings((ROOT / path).read_text())}, (path, name)
        assert path in TEXT


def test_each_forbidden_call_is_found():
    for text in (
        "import pickle as json",
        "from joblib import load",
        "def f():\n    import shelve",
        "from jax.experimental import serialize_executable",
        "f = torch.load",
        "np.load(path, allow_pickle=flag)",
        "yaml.load(text, Loader=Loader)",
        "eval(text)",
        "subprocess.run(line, shell=asked)",
        "os.system(line)",
        "importlib.import_module('pickle')",
        "needed('dill', 'x', 'y')",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ):
        assert list(findings(text)), text
    for text in ("model.eval()", "re.compile(text)", "np.load(path, allow_pickle=False)"):
        assert not list(findings(text)), text


def test_no_test_can_reach_another_machine():
    with socket.socket() as one:
        for call in (lambda: one.connect(("192.0.2.1", 80)), lambda: one.bind(("0.0.0.0", 0))):
            with pytest.raises(AssertionError, match="no test needs a network"):
                call()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_each_required_package_by_digest(lock: Path):
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ;[^\\\n]*)? \\\n((?:    --hash=\S+(?: \\)?\n)+)",
        lock.read_text(),
        re.M,
    )
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in " #"]
    assert len(entries) == len(lines) > 50, "each line is a package, a version and its digests"
    assert all(re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", e[2]) for e in entries)
    pinned = {canonicalize_name(name): version for name, version, _ in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    asked += project["optional-dependencies"]["dev"]
    for wanted in map(Requirement, asked):
        if wanted.name != "jtrain":
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted


def names_in(path: Path) -> set[str]:
    """Return the tests of a file that no mark deselects."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not any("skip" in ast.unparse(mark) or "slow" in ast.unparse(mark)
                   for mark in node.decorator_list)
    }  # fmt: skip


def test_each_promise_names_tests_that_run():
    rows = [line for line in PROMISES.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 5
    for row in rows:
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row)
        assert named, f"{row} names no test"
        for path, test in named:
            assert test in names_in(ROOT / path), f"{path} has no {test} that is run always"


def test_each_named_file_exists():
    for path in re.findall(r"`((?:jtrain|tests)/[\w/]+\.py)", TEXT):
        assert (ROOT / path).is_file(), path
