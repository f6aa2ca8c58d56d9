"""What a folder of token files says of itself."""

import json
from pathlib import Path
from typing import Any

from jtrain.errors import DataError

FORMAT = "jtrain tokens 1"
AGAIN = "Write it: jtrain data prepare FILES --out"


def read_header(folder: Path) -> dict[str, Any]:
    """The header of a folder of token files, which is whole.

    Raises:
        DataError: no such folder, none of token files, or one that is not finished.
    """
    path = folder / "header.json"
    if not path.is_file():
        raise DataError(_missing(folder))
    try:
        header = json.loads(path.read_bytes())
    except ValueError as error:
        place = getattr(error, "pos", getattr(error, "start", 0))
        raise DataError(
            f"{path} was to be the header of token files and is no JSON from byte {place} on: it "
            f"was cut or is of something else. {AGAIN} {folder}-2"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format", "no format") if isinstance(header, dict) else "no object"
        raise DataError(
            f"{path} was to be the header of {FORMAT!r} and says {found}. {AGAIN} {folder}-2"
        )
    return header


def _missing(folder: Path) -> str:
    if (folder / "progress.json").is_file():
        return (
            f"{folder} was to hold token files and is not finished. Go on by the command that "
            f"began it: jtrain data prepare FILES --out {folder}"
        )
    if not folder.is_dir():
        seen = "" if folder.is_absolute() else f", seen from {Path.cwd()}"
        return f"{folder}: no such folder of token files{seen}. {AGAIN} {folder}"
    return f"{folder} was to hold token files and has no header.json. {AGAIN} {folder}/tokens"
