"""`jtrain data show CONFIG`: rows of a run's batches in readable form."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.cli.arguments import Arguments
from jtrain.cli.pictures import render_blocks, render_shades, to_bytes
from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.data.text.tokenizer import fingerprint
from jtrain.errors import ConfigError
from jtrain.io.png import encode_png, tile_images
from jtrain.train.experiment import build_experiment

BOUNDARY, PADDING = "⏐", "·"  # between two documents of a row; padding at its end


def show(argv: Sequence[str]) -> int:
    """Print some rows; return the exit code."""
    parser = show_arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words)
    step, count = _number("--step", args.step, 0), _number("--rows", args.rows, 1)
    resolved = resolve(Path(path), words)
    config = resolved.config
    experiment = build_experiment(config, Unplaced())
    batch = {name: np.asarray(array) for name, array in experiment.train[step].items()}
    rows = {name: array[:count] for name, array in batch.items()}
    tokenizer = _tokenizer(config)
    if args.out:
        Path(args.out).write_bytes(encode_png(tile_images(to_bytes(_images(rows, path)))))
    if args.json:
        description = {"config": path, "step": step, **_as_json(batch, rows, tokenizer)}
        print(json.dumps(description))
        return 0
    print(f"{path}: step {step}, {len(batch['row'])} rows of")
    print(
        "\n".join(
            f"  {name:9} {array.dtype} {list(array.shape[1:])}" for name, array in batch.items()
        )
    )
    if tokenizer is not None and hasattr(tokenizer, "description"):
        print(f"  tokenizer {tokenizer.kind} {fingerprint(tokenizer)}, {len(tokenizer):,} tokens")
    if args.out:
        print(f"\n{args.out}: {len(rows['row'])} pictures")
    elif "image" in rows:
        render = render_blocks if sys.stdout.isatty() else render_shades
        print("\n" + render(tile_images(to_bytes(rows["image"]))))
    print("\n" + "\n".join(_lines(rows, tokenizer)))
    return 0


def _lines(rows: Mapping[str, np.ndarray], tokenizer: Any) -> list[str]:
    """Return a line for each row: its text, or its small arrays."""
    if "tokens" in rows:
        return [
            f"{row:3}  {text}"
            for row, text in zip(rows["row"], decode_rows(rows, tokenizer), strict=True)
        ]
    small = [
        name for name, array in rows.items() if array[0].size <= 8 and name not in ("row", "mask")
    ]
    return [
        f"{rows['row'][i]:3}  " + "  ".join(f"{name} {rows[name][i].tolist()}" for name in small)
        for i in range(len(rows["row"]))
    ]


def decode_rows(rows: Mapping[str, np.ndarray], tokenizer: Any) -> list[str]:
    """Return each row as text: `⏐` where a document ends, `·` for each padding token.

    Line breaks are escaped, so that a row is a line.
    """
    lines = []
    for i, tokens in enumerate(rows["tokens"]):
        segments = rows["segments"][i] if "segments" in rows else np.ones(len(tokens), int)
        used = int(rows["length"][i]) + 1 if "length" in rows else len(tokens)
        used = used if rows["mask"][i] else 0
        cuts = np.flatnonzero(np.diff(segments[:used])) + 1
        parts = np.split(tokens[:used], cuts)
        text = BOUNDARY.join(_decode(part, tokenizer) for part in parts if len(part))
        escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(escaped.replace("\t", "\\t") + PADDING * (len(tokens) - used))
    return lines


def _decode(tokens: np.ndarray, tokenizer: Any) -> str:
    return " ".join(map(str, tokens.tolist())) if tokenizer is None else tokenizer.decode(tokens)


def _tokenizer(config: Any) -> Any:
    """Return the tokenizer of the config's data; None if it has none."""
    build = getattr(getattr(config, "data", None), "build", None)
    return getattr(build(), "vocabulary", None) if build else None


def _images(rows: Mapping[str, np.ndarray], config: str) -> np.ndarray:
    if "image" in rows:
        return rows["image"]
    raise ConfigError(
        f"jtrain data show: --out writes pictures, and the rows of {config} have no `image`, only "
        f"{', '.join(rows)}; leave --out away"
    )


def _as_json(
    batch: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray], tokenizer: Any
) -> dict[str, Any]:
    arrays = {
        name: {"dtype": str(array.dtype), "shape": list(array.shape)}
        for name, array in batch.items()
    }
    digest = fingerprint(tokenizer) if hasattr(tokenizer, "description") else None
    found = {"arrays": arrays, "tokenizer": digest}
    if "tokens" in rows:
        found["rows"] = decode_rows(rows, tokenizer)
    return found


def _number(option: str, word: str, least: int) -> int:
    if word.isdigit() and int(word) >= least:
        return int(word)
    raise ConfigError(
        f"jtrain data show: {option} {word} is not a number from {least} up; write {option} 8"
    )


def show_arguments() -> Arguments:
    """Return a parser of the arguments of `jtrain data show`."""
    parser = Arguments(
        "data show",
        "Print rows of a batch that a run would train on: text (⏐ between documents, · for\n"
        "padding), pictures, or numbers. Nothing is trained.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml --step 100 --rows 4",
        "configs/fashion_mnist.yaml --out rows.png",
    )
    words = "a YAML file, values to change"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE]", nargs="*", help=words)
    parser.add_argument("--step", default="0", help="the batch (0, the first)")
    parser.add_argument("--rows", default="8", help="number of rows (8)")
    parser.add_argument("--out", metavar="FILE.png", help="write the pictures to a file instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
