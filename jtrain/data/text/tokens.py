"""Token files without a header, mapped into memory and read on access."""

from pathlib import Path

import numpy as np

from jtrain.data.sources.files import find_files
from jtrain.errors import DataError

RAW = ("uint8", "uint16", "uint32", "int32")  # what a file without a header may hold


def read_tokens(path: str | Path, dtype: str = "uint16") -> np.ndarray:  # n
    """Return the tokens of a `.npy` file, or of a raw `.bin` file of `dtype` (little-endian).

    Raises:
        DataError: no such file, no tokens in it, or a size or a type that does not match `dtype`.
    """
    (path,) = find_files(path)
    if path.suffix == ".npy":
        return _numpy_file(path)
    if dtype not in RAW:
        raise DataError(f"dtype {dtype!r} is none of {', '.join(RAW)}. Set dtype=uint16 or uint32.")
    kind = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % kind.itemsize:
        raise DataError(
            f"{path} should hold {dtype} tokens of {kind.itemsize} bytes and has {size} bytes. "
            f"Set the dtype it was written with ({', '.join(RAW)}), or write it again."
        )
    return np.memmap(path, kind, mode="r")


def _numpy_file(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} is not a complete .npy file of numbers ({error}). "
            f"Write it again with np.save(path, tokens)."
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{path} should hold one row of tokens and holds {tokens.dtype} of shape "
            f"{tokens.shape}. Save them flat: np.save(path, tokens.ravel().astype('uint16'))."
        )
    return tokens
