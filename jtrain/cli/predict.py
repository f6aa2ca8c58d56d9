"""`jtrain predict RUN --data FILE --out FILE`: the outputs of a run for each row of a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.cli.arguments import Arguments, find_config, parse_step
from jtrain.cli.output import is_first_process, print_error, redirect_output
from jtrain.cli.output import print_text as print
from jtrain.config.resolve import resolve
from jtrain.data.sources.row_files import check_kind, encode_rows, read_rows
from jtrain.errors import UserError

HEADERS = {"auto": None, "yes": True, "no": False}


def main(argv: Sequence[str]) -> int:
    """Write the outputs and print where they are; return the exit code."""
    args = _arguments().parse(argv)
    path = find_config(args.run, "predict")
    data, out = Path(args.data), Path(args.out)
    check_kind(out)
    if out.resolve() == data.resolve():
        raise UserError(
            f"jtrain predict: --out {out} is the file of --data, which it would overwrite; name "
            f"another"
        )
    if args.batch < 0:
        raise UserError(f"jtrain predict: --batch {args.batch} is not a count; write --batch 128")
    step = parse_step(args.step, "predict")
    resolved = resolve(path, args.settings)

    from jtrain.train.loaded_run import load_run

    with redirect_output():
        run = load_run(resolved.config, path.parent, step, print_error)
        rows = read_rows(data, run.inputs, header=HEADERS[args.header])
        arrays = name_outputs(run.predict(rows, batch=args.batch))
    if is_first_process():
        write_file(out, encode_rows(out, arrays))
        count = len(next(iter(arrays.values())))
        outputs = {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
        if args.json:
            found = {"run": str(args.run), "step": run.step, "rows": count, "out": str(out)}
            print(json.dumps({**found, "outputs": outputs}))
        else:
            text = ", ".join(f"{name} {kind}" for name, kind in outputs.items())
            print(f"{args.run} at step {run.step}: {count} rows of {data} -> {out}: {text}")
    return 0


def name_outputs(outputs: Any) -> Mapping[str, np.ndarray]:
    """Return the arrays of some outputs by name; a single one is called `output`."""
    from jtrain.core.pytree import named_leaves

    return {name.replace("/", ".") or "output": x for name, x in named_leaves(outputs).items()}


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically; it replaces an existing one.

    Raises:
        UserError: if it cannot be written.
    """
    from jtrain.io.regular_files import atomic_write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content)
    except OSError as error:
        raise UserError(
            f"jtrain predict: --out {path} cannot be written ({error.strerror}); name another file"
        ) from None


def _arguments() -> Arguments:
    parser = Arguments(
        "predict",
        "Write the outputs of a checkpoint for each row of a file, in the file's order: .npz with\n"
        "arrays by name, .npy, .csv or .jsonl; see docs/predict.md.",
        "digits --data scans.npz --out labels.csv",
        "runs/digits --data scans.npz --out labels.npz --step best --batch 512",
    )
    parser.add_run(settings="parallel")
    words = "the rows: .npz, .npy, .csv or .jsonl"
    parser.add_argument("--data", metavar="FILE", required=True, help=words)
    words = "the outputs: .npz, .npy, .csv or .jsonl"
    parser.add_argument("--out", metavar="FILE", required=True, help=words)
    words = "whether the first line of a .csv file is a header: yes, no, auto (by its content)"
    parser.add_argument("--header", choices=HEADERS, default="auto", help=words)
    parser.add_step()
    parser.add_argument("--batch", metavar="N", type=int, default=0, help="rows at a time (128)")
    parser.add_json()
    return parser
