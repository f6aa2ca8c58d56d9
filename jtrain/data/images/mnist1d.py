"""MNIST-1D, a computed set: ten digits as noisy curves of 40 numbers."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.arrays import Arrays

# Ten digits of twelve strokes; the tables and constants are those of the publication.
STROKES = np.array(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
LENGTH = 40  # numbers a row
DRAWN = 72  # numbers a row before it is resampled


class CurveDataset(NamedTuple):
    """`curve` (float32, n 40) and `label` (int32, n) for training and for validation."""

    train: Arrays
    test: Arrays


@configclass
class MNIST1D:
    """Curves of ten digits, padded, stretched, moved, sheared and under noise; always the same.

    With rows=5000 the numbers are those of the published set: 4000 rows for training and 1000 for
    validation.

    Source: Greydanus & Kobak 2024, https://arxiv.org/abs/2011.14439, with the same recipe and draws
    (a test compares with the package `mnist1d`).
    """

    kind: Literal["mnist1d"] = "mnist1d"
    rows: int = Field(default=5000, ge=50, multiple_of=10)
    """Curves in both parts, the same number of each digit; a fifth is for validation."""

    def build(self) -> CurveDataset:
        """Compute both parts, in 0.3 s."""
        curves, labels = _curves(self.rows)
        cut = self.rows * 4 // 5
        first, rest = (
            Arrays(curve=curves[part], label=labels[part])
            for part in (slice(None, cut), slice(cut, None))
        )
        return CurveDataset(first, rest)


def _curves(rows: int) -> tuple[np.ndarray, np.ndarray]:  # n 40, n
    """Compute the curves in the published order; mean 0 and deviation 1 over all rows."""
    draw = np.random.RandomState(42)  # the legacy generator, whose draws were published
    labels = np.repeat(np.arange(10, dtype=np.int32), rows // 10)
    templates = [_template(strokes) for strokes in STROKES]
    curves = np.stack([_curve(templates[label], draw) for label in labels])
    order = draw.permutation(rows)
    curves, labels = curves[order], labels[order]
    return ((curves - curves.mean()) / curves.std()).astype(np.float32), labels


def _template(strokes: np.ndarray) -> np.ndarray:  # 12
    """Return a digit that begins and ends at 0."""
    template = (strokes - strokes.mean()) / strokes.std()
    return (template - template[0]) / 6


def _curve(template: np.ndarray, draw: np.random.RandomState) -> np.ndarray:  # 40
    """Return a random instance of a digit; the order of the draws matters."""
    padded = np.concatenate([template + 1e-8, np.zeros(36 + int(draw.rand() * 25))])
    curve = _resample(padded, DRAWN) * (1 + 0.4 * (draw.rand() - 0.5))
    curve = np.roll(curve, draw.choice(48))
    smooth, rough = _smooth(0.25 * draw.randn(DRAWN)), 0.02 * draw.randn(DRAWN)
    curve = np.where(curve == 0, smooth, curve) + rough
    slope = 0.75 * (draw.rand() - 0.5)
    return _resample(curve - slope * np.linspace(-0.5, 0.5, DRAWN), LENGTH)


def _resample(curve: np.ndarray, count: int) -> np.ndarray:
    return np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(curve)), curve)


def _smooth(noise: np.ndarray) -> np.ndarray:
    """Smooth by a Gaussian of deviation 2, cut at 8 places, with mirrored ends."""
    bell = np.exp(-np.square(np.arange(-8, 9)) / 8)
    mirrored = np.concatenate([noise[7::-1], noise, noise[:-9:-1]])
    return np.convolve(mirrored, bell / bell.sum(), "valid")
