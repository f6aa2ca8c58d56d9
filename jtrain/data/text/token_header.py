"""The header of a folder of token files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jtrain.errors import DataError
from jtrain.io.regular_files import TooLargeError, read_json

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
        header = read_json(path)
    except (OSError, TooLargeError) as error:
        words = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"{path} should be the header of token files, and {words}. {AGAIN} {folder}-2"
        ) from None
    except ValueError as error:
        place = getattr(error, "pos", getattr(error, "start", 0))
        raise DataError(
            f"{path} should be the header of token files and is no JSON from byte {place} on: it "
            f"was cut or belongs to other data. {AGAIN} {folder}-2"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format", "no format") if isinstance(header, dict) else "no object"
        raise DataError(
            f"{path} should be the header of {FORMAT!r} and has {found}. {AGAIN} {folder}-2"
        )
    if wrong := [name for name, right in _TYPES.items() if not right(header.get(name))]:
        raise DataError(
            f"{path} should be the header of token files, and its {wrong[0]} is "
            f"{header.get(wrong[0])!r:.60}: it was changed. {AGAIN} {folder}-2"
        )
    return header


def is_file_list(found: Any) -> bool:
    """Return whether a value of JSON lists files, each with its name, count and checksum."""
    return isinstance(found, list) and all(map(_is_file, found))


def _is_file(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and _is_count(found.get("count"))
        and _is_count(found.get("crc32"))
    )


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found < 2**63


def _is_text(found: Any) -> bool:
    return isinstance(found, str)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "tokens": _is_count,
    "documents": _is_count,
    "dtype": lambda found: found in ("uint16", "uint32"),
    "tokenizer": _is_text,
    "kind": _is_text,
    "vocab": _is_count,
    "shards": is_file_list,
    "ends": lambda found: is_file_list(found) and len(found) == 1,
    "asked": lambda found: isinstance(found, dict),
}


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
