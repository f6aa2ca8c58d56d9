"""`jtrain data show CONFIG`: rows of a run's batches in readable form."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.data.text.tokenizers import fingerprint
from jtrain.errors import ConfigError
from jtrain.io.png import encode_png, tile_images
from jtrain.train.experiment import build_experiment


def to_bytes(images: np.ndarray) -> np.ndarray:  # b h w [c], or b n
    """Convert images to b h w c, uint8, with 1 or 3 channels.

    Bytes are unchanged; other numbers are scaled to the range of all images.
    A vector becomes a square picture if its size is a square, else a line. With 2 or more than 4
    channels the first is shown, with 4 the first three.
    """
    if images.ndim == 2:
        side = math.isqrt(images.shape[1])
        shape = (side, side) if side * side == images.shape[1] else (1, images.shape[1])
        images = images.reshape(len(images), *shape)
    images = images[..., None] if images.ndim == 3 else images
    images = images[..., :3] if images.shape[-1] in (3, 4) else images[..., :1]
    if images.dtype == np.uint8:
        return images
    values = images.astype(np.float64)
    low, high = np.nanmin(values), np.nanmax(values)
    return np.nan_to_num((values - low) / ((high - low) or 1) * 255).round().astype(np.uint8)


BOUNDARY, PADDING = "⏐", "·"  # between two documents of a row; padding at its end


def show(argv: Sequence[str]) -> int:
    """Print some rows; return the exit code."""
    parser = show_arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words)
    step, count = args.step, args.rows
    if step < 0 or count < 1:
        raise ConfigError("jtrain data show: --step is at least 0 and --rows at least 1")
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


def show_arguments() -> Arguments:
    """Return a parser of the arguments of `jtrain data show`."""
    parser = Arguments(
        "data show",
        "Print rows of a batch that a run would train on: text (⏐ between documents, · for\n"
        "padding) or numbers; --out writes images. Nothing is trained.",
        "configs/shakespeare.yaml",
        "configs/shakespeare.yaml --step 100 --rows 4",
        "configs/fashion_mnist.yaml --out rows.png",
    )
    parser.add_config()
    parser.add_argument("--step", type=int, default=0, help="the batch (0, the first)")
    parser.add_argument("--rows", type=int, default=8, help="number of rows (8)")
    parser.add_argument("--out", metavar="FILE.png", help="write the images to a file")
    parser.add_json()
    return parser
