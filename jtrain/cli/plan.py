"""`jtrain plan CONFIG --topology v5e:4x4`: what a step takes on devices that are not here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.errors import UserError
from jtrain.inspect.plan.topology import prepare, topology


def main(argv: Sequence[str]) -> int:
    """Compiles and prints; gives the exit code."""
    parser = _arguments()
    typed = parser.parse(argv)
    path, words = parser.config_and_words(typed.words, "--topology v5e:4x4")
    if not typed.topology:
        raise UserError(
            f"jtrain plan: for what devices? Write jtrain plan {path} --topology v5e:4x4, or cpu:8."
        )
    dump = _empty(Path(typed.dump)) if typed.dump else None
    prepare(typed.topology)
    from jtrain.config.resolve import resolve
    from jtrain.inspect.plan.plan import plan
    from jtrain.inspect.plan.table import table

    resolved = resolve(Path(path), words)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    found = plan(resolved.config, topology(typed.topology), dump)
    print(json.dumps({"config": path, **found.plain()}) if typed.json else table(found))
    return 0


def _arguments() -> Arguments:
    parser = Arguments(
        "plan",
        "Compiles the very step of `jtrain run` for devices that are not here, and prints what it\n"
        "takes on each: memory, and what crosses between devices. Nothing is trained.\n"
        "For TPUs it needs their compiler: pip install 'jtrain[plan]'.",
        "configs/llama2_7b.yaml --topology v5e:4x4                   a slice of 16 chips",
        "configs/gpt2.yaml --topology 2*v5e:4x4 parallel.kind=fsdp   two slices",
        "configs/shakespeare.yaml --topology cpu:8                   eight parts of this CPU",
    )
    words = "a YAML file, values to change"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE]", nargs="*", help=words)
    shape = "the devices: v5e:4x4, 2*v5p:4x4x4, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=shape)
    kept = "keep what the compiler writes there: the program, the buffers at the peak of memory"
    parser.add_argument("--dump", metavar="FOLDER", default="", help=kept)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _empty(folder: Path) -> Path:
    """Make the folder.

    Raises:
        UserError: if something lies there, which could be taken for what the compiler writes.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"jtrain plan: --dump {folder} is for the files of one plan, and something lies there. "
            f"Name a folder that is empty or new: --dump {folder}-2."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
