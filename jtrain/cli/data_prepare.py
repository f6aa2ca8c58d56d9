"""`jtrain data prepare FILES --out DIR`: text to token files."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments
from jtrain.config.suggestions import did_you_mean
from jtrain.data.text.documents import By
from jtrain.data.text.prepare import PrepareProgress, prepare
from jtrain.data.text.tokenizing import (
    BytePairTokens,
    ByteTokens,
    CharacterTokens,
    PretrainedTokenizer,
    Tokenizing,
)
from jtrain.errors import ConfigError

KINDS = ("bytes", "characters", "bpe")


def prepare_files(argv: Sequence[str]) -> int:
    """Writes the token files; gives the exit code."""
    typed = prepare_arguments().parse(argv)
    if not typed.files or not typed.out:
        missing = "files of text" if not typed.files else "a folder to write to"
        raise ConfigError(
            f"jtrain data prepare: {missing} must be named; write "
            f"jtrain data prepare {' '.join(typed.files) or 'FILES'} --out {typed.out or 'DIR'}"
        )
    tokenizing, by = _tokenizing(typed.tokenizer, typed.vocab), _by(typed.by)
    with _bar() as tell:
        header = prepare(
            typed.files, typed.out, tokenizing=tokenizing, by=by, field=typed.field, tell=tell
        )
    if typed.json:
        names = ("tokens", "documents", "tokenizer", "kind", "vocab", "dtype")
        print(json.dumps({"out": typed.out, **{name: header[name] for name in names}}))
    else:
        print(
            f"{typed.out}: {header['tokens']:,} tokens of {header['documents']:,} documents, by "
            f"{header['kind']} {header['tokenizer']} of {header['vocab']:,} tokens"
        )
    return 0


def _tokenizing(word: str, vocab: str | None) -> Tokenizing:
    if word == "bpe":
        if vocab is not None and not (vocab.isdigit() and int(vocab)):
            raise ConfigError(
                f"jtrain data prepare: --vocab {vocab} is no number of tokens; write --vocab 4096"
            )
        return BytePairTokens() if vocab is None else BytePairTokens(vocab=int(vocab))
    if vocab is not None:
        raise ConfigError(
            f"jtrain data prepare: --vocab {vocab} is of a tokenizer that is learned, and "
            f"--tokenizer {word} is not; write --tokenizer bpe --vocab {vocab}"
        )
    if word in KINDS:
        return ByteTokens() if word == "bytes" else CharacterTokens()
    if not Path(word).is_file():
        raise ConfigError(
            f"jtrain data prepare: --tokenizer {word} is no file and none of {', '.join(KINDS)}"
            f"{did_you_mean(word, KINDS) or '; write --tokenizer bytes'}"
        )
    return PretrainedTokenizer(path=word)


def _by(word: str) -> By:
    if word == "file" or word == "line":
        return word
    raise ConfigError(
        f"jtrain data prepare: --by {word}: a document is a file or a line; write --by line"
    )


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[PrepareProgress], None]]:
    """Shows how far it is, with speed and time left, where there is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Bar(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def tell(progress: PrepareProgress) -> None:
            task = tasks.get(progress.doing)
            if task is None:
                task = tasks[progress.doing] = bar.add_task(progress.doing, total=progress.total)
            bar.update(task, completed=progress.read)

        yield tell


def prepare_arguments() -> Arguments:
    """What may follow `jtrain data prepare`."""
    parser = Arguments(
        "data prepare",
        "Writes text as token files, which runs map into memory. Typed again, it goes on where it\n"
        "was killed.",
        "plays/*.txt --tokenizer characters --out data/plays",
        "web.jsonl --field text --tokenizer bpe --vocab 8192 --out data/web",
        "more.txt --by line --tokenizer data/web/tokenizer.json --out data/more",
    )
    parser.add_argument("files", metavar="FILES", nargs="*", help="UTF-8 text, or JSON lines")
    parser.add_argument("--out", metavar="DIR", help="the folder that is written")
    what = "bytes (default), characters, bpe (learned from the files), or a tokenizer.json"
    parser.add_argument("--tokenizer", default="bytes", help=what)
    parser.add_argument("--vocab", help="tokens of a bpe that is learned (4096)")
    parser.add_argument("--by", default="file", help="a document is a file (default) or a line")
    parser.add_argument("--field", default="text", help="where JSON lines have their text (text)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
