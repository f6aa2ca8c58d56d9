"""No module turns bytes of a file, or a text, into code; exceptions are listed by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jtrain").rglob("*.py"))

# Functions that unpickle or run what they read. `np.load` is checked by its argument.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
    "imp",
    "jax.experimental.serialize_executable",
}
CALLS = {"eval", "exec", "compile", "__import__"}  # builtins, by their bare names
METHODS = {
    "torch.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "jax.experimental.serialize_executable",
}

# File, call, and justification, as in SECURITY.md.
EXEMPT = {
    (
        "jtrain/parallel/program_cache.py",
        "jax.experimental.serialize_executable",
    ): "programs of the compile cache: machine code of this user's, checked before it is read",
    (
        "jtrain/data/batches/process_workers.py",
        "cloudpickle",
    ): "what a reading worker is given, over a pipe of the process that starts it",
    ("jtrain/data/batches/worker_process.py", "pickle"): "the same, read by the worker",
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
            names = [said] if (said := ast.unparse(node)) in METHODS else []
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
        for line, name in findings(path.read_text())
        if (here, name) not in EXEMPT
    ]
    assert not found, (
        f"{found}, by which a file can run code. Read data by json, numpy without pickle, "
        f"safetensors or YAML nodes; see SECURITY.md."
    )


def test_each_exemption_is_needed_and_documented():
    told = (ROOT / "SECURITY.md").read_text()
    for path, name in EXEMPT:
        assert name in {found for _, found in findings((ROOT / path).read_text())}, (path, name)
        assert path in told


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as json",
        "from pickle import loads",
        "import cloudpickle.compat",
        "from joblib import load",
        "import marshal, json",
        "def f():\n    import shelve",
        "from jax.experimental.serialize_executable import deserialize_and_load",
        "from jax.experimental import serialize_executable",
        "jax.experimental.serialize_executable.serialize(x)",
        "torch.load(path)",
        "from torch import load",
        "f = torch.load",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "yaml.load(text, Loader=Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=asked)",
        "os.system(line)",
        "importlib.import_module('pickle')",
        "needed('dill', 'x', 'y')",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_forbidden_call_is_found(text: str):
    assert list(findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "import json",
        "model.eval()",
        "re.compile(text)",
        "lowered.compile()",
        "np.load(path, allow_pickle=False)",
        "subprocess.run(words, shell=False)",
        "from jtrain.inspect.debug.eval_jaxpr import execute",
        "strategy.compile(step)",
        "importlib.import_module(f'jtrain.cli.{verb}')",
    ],
)
def test_similar_names_are_allowed(text: str):
    assert not list(findings(text))
