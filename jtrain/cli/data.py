"""`jtrain data prepare FILES` and `jtrain data show CONFIG`: tokenize text, print rows."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.data.sources.content import HEAD
from jtrain.data.sources.files import find_files
from jtrain.data.text.documents import has_field
from jtrain.data.text.prepare import PrepareProgress, prepare
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
        from jtrain.cli.data_show import show  # needs JAX

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
    from jtrain.cli.data_show import show_arguments

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
