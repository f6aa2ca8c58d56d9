"""A model of 8-bit numbers in numpy, by their definition and not by a library's types."""

import numpy as np

# bits of the fraction, exponent of the smallest normal number, largest number
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def round_to(x: np.ndarray, kind: tuple[int, int, float]) -> np.ndarray:
    """Return the nearest numbers of a type, ties to even, in float64; `x` is within its range."""
    fraction, smallest, largest = kind
    x = np.asarray(x, np.float64)
    assert np.abs(x).max(initial=0) <= largest
    exponent = np.floor(np.log2(np.where(x == 0, 1, np.abs(x))))
    quantum = 2.0 ** (np.maximum(exponent, smallest) - fraction)
    return np.round(x / quantum) * quantum  # numpy rounds ties to even


def quantized(x: np.ndarray, kind: tuple[int, int, float], axis: int | None) -> np.ndarray:
    """Return `x` rounded with a power of two as scale that is the largest to fit, by slices."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scale = 2.0 ** np.floor(np.log2(kind[2] / np.where(largest == 0, kind[2], largest)))
    return round_to(x * scale, kind) / scale
