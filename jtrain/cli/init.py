"""`jtrain init DIR`: write a project of one's own, which runs as it is."""

import keyword
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.config.lookup import PACKAGE, shipped_configs, shipped_experiments
from jtrain.errors import UserError
from jtrain.io.object_store import check_local_path

_TEMPLATES = Path(__file__).parent / "project_template"
_FILES = {
    "README.md": "README.md",
    "configs/@NAME@.yaml": "config.yaml",
    "experiments/@NAME@.py": "experiment.py.txt",
    "tests/test_@NAME@.py": "test.py.txt",
    ".gitignore": "gitignore.txt",
}
_HARMLESS = {".git", ".venv", ".DS_Store"}  # in a folder that is new to its owner all the same


def main(argv: Sequence[str]) -> int:
    """Write the project and print what to type next; return the exit code."""
    args = _arguments().parse(argv)
    check_local_path(args.folder, "jtrain init: DIR")
    folder = Path(args.folder)
    name = args.name or folder.resolve().name
    try:
        _check(folder, name)
        for path, text in project_files(name).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"jtrain init: {error.filename or folder} cannot be written ({error.strerror}); name a "
            f"folder that you may write: jtrain init ~/{name}"
        ) from None
    print(_next_commands(folder, name))
    return 0


def project_files(name: str) -> dict[str, str]:
    """Return the text of each file of a project, by its path in the project."""
    texts = {path: (_TEMPLATES / file).read_text("utf-8") for path, file in _FILES.items()}
    return {path.replace("@NAME@", name): text.replace("@NAME@", name)
            for path, text in texts.items()}  # fmt: skip


def _check(folder: Path, name: str) -> None:
    """Raise unless the folder is free, and an experiment and its run may have the name."""
    taken = os.path.lexists(folder)
    if folder.is_dir():
        taken = not {*os.listdir(folder)} <= _HARMLESS
    if trouble := _find_name_trouble(name):
        found = f"the experiment would be named {name or 'nothing'}, {trouble}"
    elif taken:
        found = f"{folder} must be a new or an empty folder"
    else:
        return
    other = folder / "project" if folder.resolve() == Path.cwd() else f"{folder}_2"
    words = ["jtrain", "init", str(other if taken else folder), "--name", _nearest_name(name)]
    raise UserError(f"jtrain init: {found}; write {shlex.join(words)}")


def _find_name_trouble(name: str) -> str:
    """Return why an experiment cannot have the name; empty if it can."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        return "which is not a name of a Python module"
    if name == PACKAGE or name in {*shipped_experiments(), *shipped_configs()}:
        return "which is taken: jtrain comes with one of that name"
    return ""


def _nearest_name(name: str) -> str:
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return f"my_{plain}".rstrip("_") if _find_name_trouble(plain) else plain


def _next_commands(folder: Path, name: str) -> str:
    lines = [f"{folder / path}" for path in project_files(name)]
    commands = [f"cd {shlex.quote(str(folder))}"] if folder.resolve() != Path.cwd() else []
    commands += [
        f"jtrain run configs/{name}.yaml",
        "python3 -m pytest   its test (pip install pytest)",
    ]
    return "\n".join(lines) + "\n\nnext:  " + "\n       ".join(commands)


def _arguments() -> Arguments:
    parser = Arguments(
        "init",
        "Write a project of your own into a new folder: an experiment, its config, its test, a\n"
        "README. It runs as it is; change the data, the model and the loss in it.",
        "my_study                   experiments/my_study.py, configs/my_study.yaml ...",
        "work/2027-01 --name rings  a folder whose name is not a name of a module",
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that is new or empty")
    words = "the name of the experiment and its config; default the folder's name"
    parser.add_argument("--name", metavar="NAME", default="", help=words)
    return parser
