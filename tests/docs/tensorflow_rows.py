"""The rows of docs/tensorflow.md as programs: TensorFlow's block and jtrain's. Not a test itself.

They stand in tensorflow_rows.md, a heading each; the page has their calls in tables.

`python tests/docs/tensorflow_rows.py FILE [ROW ...]` runs TensorFlow's blocks, which need the extra
`tensorflow`, and writes what each leaves in `result`. tests/docs/tensorflow_numbers.json is such a
file.
"""

import datetime
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "tensorflow.md"
PROGRAMS = Path(__file__).parent / "tensorflow_rows.md"
NUMBERS = Path(__file__).parent / "tensorflow_numbers.json"
ONE = "--one"
_PART = re.compile(r"^##+ (.*?)$(.*?)(?=^##+ |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"((?:^<!-- .* -->\n)?)^```(py|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """What TensorFlow and jtrain type for the same thing."""

    name: str
    theirs: str
    ours: str
    runs: bool
    """Whether TensorFlow's side can be run by a test."""
    line: int
    """Of jtrain's block in the file."""


def rows() -> Sequence[Row]:
    """Return the rows in their order, the shared lines of both sides first."""
    text, found = PROGRAMS.read_text(), []
    for part in _PART.finditer(text):
        blocks = {kind: (mark, code) for mark, kind, code in _BLOCK.findall(part[2])}
        if not blocks:
            continue
        assert set(blocks) == {"py", "python"}, f"{part[1]}: a block of each side"
        mark, theirs = blocks["py"]
        ours = blocks["python"][1]
        line = text[: part.start() + part[0].index(ours)].count("\n")
        found.append(Row(part[1], theirs, ours, "not run" not in mark, line))
    assert found[0].name == "Setup"
    return found


def run_theirs(names: Sequence[str] = ()) -> dict[str, Any]:
    """Run TensorFlow's side of rows, by default of all, each in a process of its own."""
    results = {}
    for row in rows()[1:]:
        if row.runs and (not names or row.name in names):
            command = [sys.executable, __file__, ONE, row.name]
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{row.name}: {done.stderr[-3000:]}")
            results[row.name] = json.loads(done.stdout.splitlines()[-1])
            print(row.name, results[row.name], flush=True)
    return results


def run_row(name: str) -> Any:
    """Run TensorFlow's side of a row here and return its result as JSON."""
    shared, *others = rows()
    row = next(row for row in others if row.name == name)
    script = Path("row.py")  # AutoGraph reads the source of what it compiles
    script.write_text(shared.theirs + row.theirs)
    return plain(runpy.run_path(str(script))["result"])


def plain(result: Any) -> Any:
    """Return a result as JSON: numbers, texts, lists and mappings of them."""
    if isinstance(result, Mapping):
        return {name: plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    if isinstance(result, str | bool | int | float) or result is None:
        return result
    return plain(result.tolist())  # an array, or a number of numpy


def main() -> None:
    """Write the numbers of all rows, or replace those of some."""
    file, *names = sys.argv[1:]
    if file == ONE:
        print(json.dumps(run_row(names[0])))
        return
    results = run_theirs(names)
    if names:
        results = json.loads(Path(file).read_text())["results"] | results
    import keras
    import tensorflow

    about = {"tensorflow": tensorflow.__version__, "keras": keras.__version__}
    about["date"] = datetime.date.today().isoformat()
    order = [row.name for row in rows() if row.name in results]
    results = ",\n".join(f'  "{name}": {json.dumps(results[name])}' for name in order)
    about = "".join(f' "{name}": "{value}",\n' for name, value in about.items())
    Path(file).write_text(f'{{\n{about} "results": {{\n{results}\n }}\n}}\n')


if __name__ == "__main__":
    main()
