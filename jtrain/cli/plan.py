"""`jtrain plan CONFIG --topology v5e:4x4`: the cost of a step on devices that are not here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.errors import UserError
from jtrain.inspect.plan.topology import find_topology, prepare_environment


def main(argv: Sequence[str]) -> int:
    """Compile and print; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words, "--topology v5e:4x4")
    if not args.topology:
        raise UserError(
            f"jtrain plan: the devices are missing. Write jtrain plan {path} --topology v5e:4x4, "
            f"or cpu:8."
        )
    dump = _make_empty(Path(args.dump)) if args.dump else None
    prepare_environment(args.topology)
    from jtrain.config.resolve import resolve
    from jtrain.distributed.compiler_flags import apply_flags
    from jtrain.inspect.plan.plan import format_plan, make_plan

    resolved = resolve(Path(path), words)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    xla = resolved.config.xla
    for line in apply_flags(xla.preset, xla.flags, xla.tpu_flags):
        print(line, file=sys.stderr)
    found = make_plan(resolved.config, find_topology(args.topology), dump)
    print(json.dumps({"config": path, **found.plain()}) if args.json else format_plan(found))
    return 0


def _arguments() -> Arguments:
    parser = Arguments(
        "plan",
        "Compile the exact step of `jtrain run` for devices that are not here, and print its cost\n"
        "on each: memory, and traffic between devices. Nothing is trained.\n"
        "TPUs need their compiler: pip install 'jtrain[plan]'.",
        "configs/llama2_7b.yaml --topology v5e:4x4                   a slice of 16 chips",
        "configs/gpt2.yaml --topology 2*v5e:4x4 parallel.kind=fsdp   two slices",
        "configs/shakespeare.yaml --topology cpu:8                   eight parts of this CPU",
    )
    words = "a YAML file, values to change"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE]", nargs="*", help=words)
    shape = "the devices: v5e:4x4, 2*v5p:4x4x4, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=shape)
    words = "keep the compiler's files there: the program, the buffers at the memory peak"
    parser.add_argument("--dump", metavar="FOLDER", default="", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _make_empty(folder: Path) -> Path:
    """Create the folder.

    Raises:
        UserError: if it is not empty: its files could be mistaken for the compiler's.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"jtrain plan: --dump {folder} is for the files of one plan, and it is not empty. "
            f"Name a folder that is empty or new: --dump {folder}-2."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
