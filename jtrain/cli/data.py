"""`jtrain data prepare FILES` and `jtrain data show CONFIG`: tokenize text, print rows."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.data.sources.content import HEAD
from jtrain.data.sources.files import find_files
from jtrain.data.text.documents import has_field
from jtrain.data.text.prepare import PrepareProgress, prepare
from jtrain.data.text.tokenizers import fingerprint
from jtrain.data.text.tokenizing import (
    BytePairTokens,
    ByteTokens,
    CharacterTokens,
    PretrainedTokenizer,
    Tokenizing,
)
from jtrain.errors import ConfigError, UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.hub import is_hub_name
from jtrain.io.png import encode_png, tile_images
from jtrain.io.regular_files import open_regular

DOES = {
    "prepare": "write text as token files, which a run reads without a tokenizer",
    "show": "print rows of a config's batches as text, pictures or numbers",
}
KINDS = ("bytes", "characters", "bpe")


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; return the exit code."""
    action, *rest = argv or ["--help"]
    if action == "prepare":
        return prepare_files(rest)
    if action == "show":
        return show(rest)
    if action in {"-h", "--help"}:
        print("\n".join(f"jtrain data {name:8} {what}" for name, what in DOES.items()))
        return 0
    raise UserError(
        f"jtrain data: {action} is not one of {', '.join(DOES)}{did_you_mean(action, list(DOES))}; "
        f"write jtrain data prepare FILES --out DIR, or jtrain data show CONFIG"
    )


def arguments_of(action: str) -> Arguments:
    """Return a parser of the arguments of a subcommand."""
    return prepare_arguments() if action == "prepare" else show_arguments()


def prepare_files(argv: Sequence[str]) -> int:
    """Write the token files; return the exit code."""
    args = prepare_arguments().parse(argv)
    if not args.files or not args.out:
        missing = "files of text" if not args.files else "a folder to write to"
        raise ConfigError(
            f"jtrain data prepare: {missing} must be named; write "
            f"jtrain data prepare {' '.join(args.files) or 'FILES'} --out {args.out or 'DIR'}"
        )
    tokenizing = _tokenizing(args.tokenizer, args.vocab)
    field = "text" if args.field is None else args.field
    for path in find_files(args.files) if args.field else ():
        with open_regular(path) as file:
            has_field(path, file.read(HEAD), field, needed=True)
    with _progress_bar() as tell:
        header = prepare(
            args.files, args.out, tokenizing=tokenizing, by=args.by, field=field, report=tell
        )
    if args.json:
        names = ("tokens", "documents", "tokenizer", "kind", "vocab", "dtype")
        print(json.dumps({"out": args.out, **{name: header[name] for name in names}}))
    else:
        print(
            f"{args.out}: {header['tokens']:,} tokens of {header['documents']:,} documents, by "
            f"{header['kind']} {header['tokenizer']} of {header['vocab']:,} tokens"
        )
    return 0


def _tokenizing(word: str, vocab: int | None) -> Tokenizing:
    if word == "bpe":
        return BytePairTokens() if vocab is None else BytePairTokens(vocab=vocab)
    if vocab is not None:
        raise ConfigError(
            f"jtrain data prepare: --vocab {vocab} is for a learned tokenizer, and "
            f"--tokenizer {word} is not learned; write --tokenizer bpe --vocab {vocab}"
        )
    if word in KINDS:
        return ByteTokens() if word == "bytes" else CharacterTokens()
    if not (Path(word).exists() or is_hub_name(word)):
        raise ConfigError(
            f"jtrain data prepare: --tokenizer {word} is neither a file nor one of "
            f"{', '.join(KINDS)}{did_you_mean(word, KINDS) or '; write --tokenizer bytes'}"
        )
    return PretrainedTokenizer(path=word)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[PrepareProgress], None]]:
    """Show a progress bar with speed and time left, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = [rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn()]
    columns += [rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def tell(progress: PrepareProgress) -> None:
            task = tasks.get(progress.phase)
            if task is None:
                task = tasks[progress.phase] = bar.add_task(progress.phase, total=progress.total)
            bar.update(task, completed=progress.read)

        yield tell


def prepare_arguments() -> Arguments:
    """Return a parser of the arguments of `jtrain data prepare`."""
    parser = Arguments(
        "data prepare",
        "Write text as token files, which runs map into memory. The same command resumes after a\n"
        "kill.",
        "plays/*.txt --tokenizer characters --out data/plays",
        "web.jsonl --field text --tokenizer bpe --vocab 8192 --out data/web",
        "more.txt --by line --tokenizer data/web/tokenizer.json --out data/more",
    )
    parser.add_argument("files", metavar="FILES", nargs="*", help="UTF-8 text, or JSON lines")
    parser.add_argument("--out", metavar="DIR", help="the output folder")
    words = "bytes (default), characters, bpe (learned from the files), tokenizer.json or GGUF file"
    parser.add_argument("--tokenizer", default="bytes", help=words)
    parser.add_argument("--vocab", type=int, help="vocabulary size of a learned bpe (4096)")
    words = "a document is a file (default) or a line"
    parser.add_argument("--by", choices=["file", "line"], default="file", help=words)
    words = "the field of JSON lines that holds the text (text); '': learn JSON and CSV as they are"
    parser.add_argument("--field", help=words)
    parser.add_json()
    return parser


def to_bytes(images: np.ndarray) -> np.ndarray:  # b h w [c]
    """Convert images to b h w c, uint8, with 1 or 3 channels.

    Bytes are unchanged; other numbers are scaled to the range of all images.
    With 2 or more than 4 channels the first is shown, with 4 the first three.
    """
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
    from jtrain.config.resolve import resolve
    from jtrain.core.placement import Unplaced
    from jtrain.train.experiment import build_experiment  # needs JAX
    from jtrain.train.resolve import resolve as resolve_run

    config = resolve(Path(path), words).config
    if config.stages:  # of which one takes the step
        train = resolve_run(config).train(own_rows=False)
    else:
        train = build_experiment(config, Unplaced()).train
    batch = {name: np.asarray(array) for name, array in train[step].items()}
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
