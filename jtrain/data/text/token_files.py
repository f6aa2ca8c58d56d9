"""Token files: a folder of them, mapped into memory and read on access."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_files
from jtrain.data.sources.files import fetch_folder
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizers import Tokenizer, describe_tokenizer, fingerprint
from jtrain.errors import DataError
from jtrain.io.object_store import is_address
from jtrain.io.regular_files import check_regular, read_json, resolve_inside

FORMAT = "jtrain tokens 1"
AGAIN = "Write it: jtrain data prepare FILES --out"


def read_header(folder: Path) -> dict[str, Any]:
    """Return the header of a complete folder of token files.

    Raises:
        DataError: no such folder, no token files in it, or a folder that is not finished.
    """
    path = folder / "header.json"
    if not path.is_file():
        raise DataError(_missing(folder))
    try:
        header = dict(read_json(path))
        if header.get("format") == FORMAT:
            return header
        error = f"it has the format {header.get('format')}"
    except (OSError, ValueError, TypeError) as problem:
        error = problem
    raise DataError(
        f"{path} should be the header of {FORMAT!r} and is not: {error}. It was cut or belongs to "
        f"other data. {AGAIN} {folder}-2"
    )


def _missing(folder: Path) -> str:
    if (folder / "progress.json").is_file():
        return (
            f"{folder} should hold token files and is not finished. Resume with the command that "
            f"started it: jtrain data prepare FILES --out {folder}"
        )
    if not folder.is_dir():
        base = "" if folder.is_absolute() else f", relative to {Path.cwd()}"
        return f"{folder}: no such folder of token files{base}. {AGAIN} {folder}"
    return f"{folder} should hold token files and has no header.json. {AGAIN} {folder}/tokens"


class TokenRange:
    """Tokens `first` .. `last` of a folder, numbered from 0, for `Windows` and `Packed`."""

    ndim = 1

    def __init__(self, files: "TokenFiles", first: int, last: int):
        self.files, self.first, self.last = files, first, last
        self.dtype = files.dtype

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def shape(self) -> tuple[int]:
        """Shape, as of an array."""
        return (len(self),)

    def __getitem__(self, part: slice) -> np.ndarray:  # n
        """Copy the tokens of a slice without a step."""
        first, last, _ = part.indices(len(self))
        return self.gather(np.array([first]), max(last - first, 0))[0]

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Copy `count` tokens from each of `starts` (int64, b) on: b count."""
        return self.files.gather(starts + self.first, count)

    def fingerprint(self) -> str:
        """Return the fingerprint of the tokens: their checksums, and samples of the files."""
        files = self.files
        checksums = [str(file["crc32"]) for file in files.header["shards"]]
        paths = [files.path / file["name"] for file in files.header["shards"]]
        files_line = fingerprint_files(paths, files.header["tokenizer"], *checksums)
        return f"tokens {self.first} to {self.last} of {files_line}"

    def documents(self) -> np.ndarray:  # n + 1
        """Return where documents start, int64, and the total length; a cut one counts as two."""
        ends = self.files.ends
        first, last = np.searchsorted(ends, self.first, "right"), np.searchsorted(ends, self.last)
        return np.concatenate([[0], ends[first:last] - self.first, [len(self)]])


class TokenFiles(TokenRange):
    """The tokens of a folder written by `jtrain data prepare`.

    Args:
        path: the folder, or its address in an object store, which is copied first.
        tokenizer: the required fingerprint of its tokenizer; empty: any.

    Raises:
        DataError: no such folder, a file that was cut or changed, or another tokenizer.
    """

    def __init__(self, path: str | Path, *, tokenizer: str = ""):
        self.path = fetch_folder(str(path)) if is_address(path) else Path(path)
        self.header = read_header(self.path)
        self.tokenizer = self._read_tokenizer(tokenizer)
        self.vocab: int = self.header["vocab"]
        self.dtype = np.dtype(self.header["dtype"]).newbyteorder("<")
        self._shards = [self._map(file, self.dtype) for file in self.header["shards"]]
        self._names = [file["name"] for file in self.header["shards"]]
        self._begins = np.cumsum([0, *map(len, self._shards)])
        self.ends = self._map(self.header["ends"][0], np.dtype("<i8"))
        """The end of each document, in tokens."""
        super().__init__(self, 0, self.header["tokens"])
        self._check_ends()

    def split(self, validation: float) -> tuple[TokenRange, TokenRange]:
        """Split the tokens: the first for training, a share of about `validation` at the end.

        The split is between two documents if that changes neither part by more than a tenth, else
        within a document.

        Raises:
            DataError: one of the parts would be empty.
        """
        wanted = round(len(self) * (1 - validation))
        if not 0 < wanted < len(self):
            share = 0.1 if len(self) >= 20 else 0.5
            raise DataError(
                f"validation {validation} of {self.path} ({len(self):,} tokens) leaves one of the "
                f"two parts empty. Set data.validation={share}, or prepare more text."
            )
        cut = int(self.ends[_nearest(self.ends, wanted)])
        far = abs(cut - wanted) > 0.1 * min(wanted, len(self) - wanted)
        cut = wanted if far else cut
        return TokenRange(self, 0, cut), TokenRange(self, cut, len(self))

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return `count` tokens from each of `starts` (int64, b) on, b count.

        Raises:
            DataError: a token that the tokenizer does not have, by file and byte.
        """
        out = np.empty((len(starts), count), self.dtype)
        shards = np.searchsorted(self._begins, starts, "right") - 1
        for number in set(shards.tolist()):
            tokens, local = self._shards[number], starts - self._begins[number]
            chosen = np.flatnonzero((shards == number) & (local + count <= len(tokens)))
            if count and len(chosen):
                view = np.lib.stride_tricks.sliding_window_view(tokens, count)
                out[chosen] = view[local[chosen]]
            for row in np.flatnonzero((shards == number) & (local + count > len(tokens))):
                out[row] = self._gather_across(int(starts[row]), count)
        if out.size and out.max() >= self.vocab:
            row, column = np.argwhere(out >= self.vocab)[0]
            self._raise_token_error(int(starts[row] + column), int(out[row, column]))
        return out

    def verify(self) -> None:
        """Read every byte and compare the checksums.

        Raises:
            DataError: the first file that was changed since it was written.
        """
        files = [*self.header["shards"], *self.header["ends"]]
        for file, numbers in zip(files, [*self._shards, self.ends], strict=True):
            found = 0
            for first in range(0, len(numbers), 1 << 20):
                found = zlib.crc32(numbers[first : first + (1 << 20)].tobytes(), found)
            if found != file["crc32"]:
                raise DataError(
                    f"{self.path / file['name']} was written with the checksum {file['crc32']:08x} "
                    f"and has {found:08x}: it was changed since. {self._advice}"
                )

    @property
    def _advice(self) -> str:
        return f"Write it again: rm -r {self.path}; jtrain data prepare FILES --out {self.path}"

    def _read_tokenizer(self, wanted: str) -> Tokenizer:
        found = read_tokenizer(self.path / "tokenizer.json")
        if fingerprint(found) != self.header["tokenizer"]:
            raise DataError(
                f"{self.path} was written by tokenizer {self.header['tokenizer']}, and its "
                f"tokenizer.json is now {describe_tokenizer(found)}. {self._advice}"
            )
        if wanted and wanted != self.header["tokenizer"]:
            raise DataError(
                f"Tokenizer {wanted} was requested, and {self.path} was written by "
                f"{describe_tokenizer(found)}. "
                f"Set data.tokenizer={self.header['tokenizer']}, or write it again: jtrain data "
                f"prepare FILES --tokenizer TOKENIZER.json --out {self.path}-2"
            )
        return found

    def _map(self, file: dict[str, Any], dtype: np.dtype) -> np.ndarray:
        """Map the numbers of one file."""
        path = resolve_inside(self.path, file["name"], DataError, self.path / "header.json")
        wanted = file["count"] * dtype.itemsize
        found = path.stat().st_size if path.is_file() else 0
        if found != wanted:
            problem = "is missing or was cut" if found < wanted else "has other data behind that"
            raise DataError(
                f"{path} should end at byte {wanted} and ends at {found}: it {problem}. "
                f"{self._advice}"
            )
        check_regular(path)
        return np.memmap(path, dtype, mode="r") if wanted else np.empty(0, dtype)

    def _gather_across(self, start: int, count: int) -> np.ndarray:
        """Return tokens that span more than one file."""
        parts = []
        for number in range(len(self._shards)):
            begin = int(self._begins[number])
            first, last = max(start - begin, 0), start + count - begin
            if first < len(self._shards[number]) and last > 0:
                parts.append(self._shards[number][first:last])
        return np.concatenate(parts)

    def _check_ends(self) -> None:
        """Raise DataError unless the ends ascend up to the number of tokens."""
        wrong = np.diff(self.ends, prepend=0) < 0
        if len(wrong):
            wrong[-1] |= self.ends[-1] != len(self)
        if wrong.any():
            document = int(wrong.argmax())
            raise DataError(
                f"{self.path / self.header['ends'][0]['name']} should hold the ends of documents, "
                f"up to {len(self)}, and has {self.ends[document]} at byte {8 * document}: it "
                f"belongs to other data. {self._advice}"
            )

    def _raise_token_error(self, place: int, token: int) -> None:
        number = int(np.searchsorted(self._begins, place, "right")) - 1
        offset = (place - int(self._begins[number])) * self.dtype.itemsize
        raise DataError(
            f"{self.path / self._names[number]} should hold tokens below {self.vocab} and has "
            f"{token} at byte {offset}: it belongs to other data. {self._advice}"
        )


def _nearest(ends: np.ndarray, wanted: int) -> int:
    """Return the index of the end that is nearest to `wanted`."""
    after = min(int(np.searchsorted(ends, wanted)), len(ends) - 1)
    before = max(after - 1, 0)
    return min(before, after, key=lambda place: abs(int(ends[place]) - wanted))
