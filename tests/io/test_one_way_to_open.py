"""Files of a user are opened in one way: jtrain/io/regular_files.py, which waits for nobody."""

# ruff: noqa: E501  (a list reads best on a line)

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "jtrain"
# What opens a file by its name, in Python and in other libraries.
METHODS = {"read_text", "read_bytes", "open"}
BY_NAME = {
    "np.load", "np.memmap", "np.fromfile", "np.loadtxt", "np.genfromtxt", "parquet.ParquetFile", "gguf.GGUFReader",
    "jax.profiler.ProfileData.from_file", "json.load", "os.open", "os.fdopen", "zipfile.ZipFile", "tarfile.open",
    "gzip.open", "gzip.GzipFile", "bz2.open", "lzma.open", "pillow.open", "Tokenizer.from_file", "io.open", "open", "codecs.open",
}  # fmt: skip
LAST = METHODS | {name.rpartition(".")[2] for name in BY_NAME}
CHECKS = {"open_regular", "check_regular", "read_bytes", "open_decompressed", "_opened"}
WRITES = {'"w', "'w", '"a"', "'a'", "O_WRONLY", "O_DIRECTORY", "os.devnull"}

OWN = "a file of the package itself"
KERNEL = "a file of Linux, of /proc or /sys"
CACHE = "a file of jtrain's own cache, in a directory that only this user may write"
EXEMPT = {
    "io/regular_files.py": "the one way",
    "config/read.py": "a pipe that a shell gives, as in `jtrain run <(sed ...)`, read up to a cap",
    "checkpoint/lock.py": "the lock, whose other end is the same program",
    "checkpoint/seal.py": "flushes what was written, without waiting",
    "cli/init.py": OWN,
    "inspect/report/page.py": OWN,
    "data/known_sets.py": OWN,
    "train/processes.py": "the experiment's own code, which is run",
    "parallel/program_cache.py": f"{CACHE}; /proc/cpuinfo",
    "inspect/plan/compile.py": f"{CACHE}; what the compiler wrote into a temporary folder",
    "inspect/plan/roofline.py": CACHE,
    "data/batches/row_cache.py": "files that this object has made",
    "distributed/accelerators.py": KERNEL,
    "distributed/launcher/worker.py": KERNEL,
    "distributed/port.py": KERNEL,
    "distributed/heartbeat.py": KERNEL,
    "checkpoint/writer_beat.py": KERNEL,
    "train/hooks/speed.py": KERNEL,
}  # fmt: skip


def openings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the calls that open a file to read it, and are in no function that checks it."""
    text = file.read_text()
    if not re.search(
        r"open|read_text|read_bytes|load|memmap|fromfile|fromtxt|Reader|[Ff]ile\(", text
    ):
        return
    tree = ast.parse(text)
    checked = set()
    for node in ast.walk(tree) if any(name in text for name in CHECKS) else ():
        if isinstance(node, ast.FunctionDef) and _names(node) & CHECKS:
            checked |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _last_name(node.func) not in LAST:
            continue
        said, called = ast.unparse(node), ast.unparse(node.func)
        method = called.rpartition(".")[2] if "." in called else ""
        is_path = method in METHODS and called not in BY_NAME and _may_be_path(node)
        by_name = called in BY_NAME and id(node) not in checked
        if (is_path or by_name) and not any(word in said for word in WRITES):
            yield node.lineno, said[:80]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}


def _may_be_path(node: ast.Call) -> bool:
    """Return whether `x.open(...)` can be of a path: `tracker.open(about)` has no mode."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "open":
        return True
    words = [ast.unparse(x) for x in (*node.args, *(k.value for k in node.keywords))]
    path = ast.unparse(node.func.value) != "self"
    return (path and not words) or any(
        w.strip("'\"") in {"r", "rb", "r+", "rt", "utf-8"} for w in words
    )


def test_files_of_a_user_are_opened_in_one_way():
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith("distributed/launcher/ray/"):
            continue
        if lines := list(openings(file)):
            found[name] = lines
    assert {n: lines for n, lines in found.items() if n not in EXEMPT} == {}
    assert EXEMPT.keys() - found.keys() - {"io/regular_files.py"} == set()
