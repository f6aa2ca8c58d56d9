"""Files of a user are opened in one way: jtrain/io/regular_files.py, which waits for nobody."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "jtrain"
OPENS = re.compile(
    r"\.read_text\(|\.read_bytes\(|(?<![\w.`])(?<!def )open\(|\bos\.open\(|"
    r"\bfdopen\(|tarfile\.open\(|np\.(load|memmap|fromfile|loadtxt|genfromtxt)\(|GGUFReader\(|"
    r"(Parquet|Zip|Tar|Gzip)File\(|json\.load\(|\.from_file\("
)
WRITES = re.compile(r"[\"'][wa]b?[\"']|O_WRONLY|O_DIRECTORY|os\.devnull")
KERNEL = "a file of Linux, of /proc or /sys"
OWN = "a file of the package itself, or of its own cache"
EJECTED = "code of an ejected file, which opens its own"
EXEMPT = {
    "io/regular_files.py": "the one way", "cli/init.py": OWN,
    "data/batches/row_cache.py": "files that this object has made",
    "data/images/image_dataset.py": "mapped after its header was read in the one way",
    "data/known_sets.py": OWN, "distributed/accelerators.py": KERNEL,
    "distributed/heartbeat.py": KERNEL,
    "inspect/eject/assemble.py": OWN, "inspect/eject/pieces/rows.py": EJECTED,
    "inspect/eject/pieces/safetensors.py": EJECTED, "inspect/eject/pieces/tokens.py": EJECTED,
    "inspect/eject/pieces/token_files.py": EJECTED,
    "inspect/report/page.py": OWN, "io/lazy_names.py": OWN, "parallel/program_cache.py": OWN,
    "train/fit_data.py": "an advice", "train/hooks/speed.py": KERNEL,
    "train/processes.py": "the experiment's own code, which is run",
}  # fmt: skip


def openings(file: Path) -> list[str]:
    """Return the lines that open a file to read it, where none is opened in the one way."""
    text = file.read_text()
    if "jtrain.io.regular_files import" in text:
        return []
    return [line for line in text.splitlines() if OPENS.search(line) and not WRITES.search(line)]


def test_files_of_a_user_are_opened_in_one_way():
    names = {file.relative_to(ROOT).as_posix(): openings(file) for file in ROOT.rglob("*.py")}
    assert {name for name, lines in names.items() if lines} == EXEMPT.keys()
