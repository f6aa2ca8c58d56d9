"""`jtrain eject CONFIG -o FILE.py`: a config as one file that needs jax, optax and numpy alone."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.errors import DIFFERS, DONE, UserError
from jtrain.io.object_store import check_local_path


def main(argv: Sequence[str]) -> int:
    """Write the file, and compare its first steps with jtrain's; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words, "-o FILE.py")
    if not args.out:
        raise UserError(
            f"jtrain eject: the file is missing; write jtrain eject {path} -o {Path(path).stem}.py"
        )
    check_local_path(args.out, "jtrain eject: -o")
    if args.check is not None and args.check < 0:
        raise UserError(f"jtrain eject: --check {args.check} is no number of steps; write 3, or 0")
    resolved = resolve_config(path, words)

    import jax

    jax.config.update("jax_platforms", "cpu")  # where both programs have the same bits
    from jtrain.inspect.eject.eject import LARGE, compare, eject

    command = shlex.join(["jtrain", "eject", path, *words])
    ejected = eject(resolved.config, Path(args.out), command)
    steps = args.check if args.check is not None else 3 * (ejected.size <= LARGE)
    found = compare(ejected, steps) if steps else None
    files = [str(each) for each in (ejected.file, ejected.data) if each]
    if args.json:
        print(json.dumps({"files": files, "steps": steps, "same": found and found.same}))
    else:
        print(f"wrote {' and '.join(files)}; python {ejected.file} --steps 20")
    if found is None:
        print_error(f"not compared: {ejected.size:,} parameters. Where they fit: --check 3")
        return DONE
    if found.same:
        print_error(f"its first {steps} steps are those of jtrain run, bit for bit")
        return DONE
    print_error(
        f"jtrain eject: {found.describe()}. If experiments/ has been changed, change the file in "
        f"the same way; --check 0 writes it without a comparison."
    )
    return DIFFERS


def _arguments() -> Arguments:
    parser = Arguments(
        "eject",
        "Write a config as one readable program of jax, optax and numpy: data, model, loss, step\n"
        "and loop, with the config's values written in. It takes the same steps as `jtrain run`,\n"
        "bit for bit on a CPU, and begins with what `jtrain export --to safetensors` wrote. The\n"
        "exit code is 1 if the first steps differ.",
        "configs/digits.yaml -o digits_by_hand.py",
        "configs/shakespeare.yaml model.layers=2 -o plays.py",
    )
    parser.add_config()
    parser.add_argument("-o", "--out", default="", metavar="FILE.py", help="the file to write")
    words = "steps of both programs that are compared (3, or 0 where the model is large)"
    parser.add_argument("--check", type=int, metavar="N", help=words)
    parser.add_json()
    return parser
