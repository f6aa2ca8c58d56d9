"""The values of MNIST-1D, a set that is computed: ten digits as noisy curves of 40 numbers."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.sources.arrays import Arrays

# A digit as it is drawn, in twelve strokes; the tables and constants are those of the publication.
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
DRAWN = 72  # numbers a row before it is thinned out


class CurveDataset(NamedTuple):
    """`curve` (float32, n 40) and `label` (int32, n) to train on, and to judge by."""

    train: Arrays
    test: Arrays


@configclass
class MNIST1D:
    """Curves of ten digits, padded, stretched, moved, sheared and under noise; always the same.

    With rows=5000 they are the numbers of the published set: 4000 to train on and 1000 to judge by.

    Source: Greydanus & Kobak 2024, https://arxiv.org/abs/2011.14439, whose recipe and draws these
    are (a test compares with the package `mnist1d`).
    """

    kind: Literal["mnist1d"] = "mnist1d"
    rows: int = Field(default=5000, ge=50, multiple_of=10)
    """Curves of both parts together, as many of each digit; of them a fifth is to judge by."""

    def build(self) -> CurveDataset:
        """Both parts; 0.3 s."""
        curves, labels = _curves(self.rows)
        cut = self.rows * 4 // 5
        first, rest = (
            Arrays(curve=curves[part], label=labels[part])
            for part in (slice(None, cut), slice(cut, None))
        )
        return CurveDataset(first, rest)


def _curves(rows: int) -> tuple[np.ndarray, np.ndarray]:  # n 40, n
    """The curves in the published order; mean 0 and deviation 1 over the whole set."""
    draw = np.random.RandomState(42)  # of the old kind: these are its draws
    labels = np.repeat(np.arange(10, dtype=np.int32), rows // 10)
    templates = [_template(strokes) for strokes in STROKES]
    curves = np.stack([_curve(templates[label], draw) for label in labels])
    order = draw.permutation(rows)
    curves, labels = curves[order], labels[order]
    return ((curves - curves.mean()) / curves.std()).astype(np.float32), labels


def _template(strokes: np.ndarray) -> np.ndarray:  # 12
    """A digit that begins and ends at 0."""
    template = (strokes - strokes.mean()) / strokes.std()
    return (template - template[0]) / 6


def _curve(template: np.ndarray, draw: np.random.RandomState) -> np.ndarray:  # 40
    """A digit as it is seen once. The order of the draws matters."""
    padded = np.concatenate([template + 1e-8, np.zeros(36 + int(draw.rand() * 25))])
    curve = _resampled(padded, DRAWN) * (1 + 0.4 * (draw.rand() - 0.5))
    curve = np.roll(curve, draw.choice(48))
    smooth, rough = _smoothed(0.25 * draw.randn(DRAWN)), 0.02 * draw.randn(DRAWN)
    curve = np.where(curve == 0, smooth, curve) + rough
    slope = 0.75 * (draw.rand() - 0.5)
    return _resampled(curve - slope * np.linspace(-0.5, 0.5, DRAWN), LENGTH)


def _resampled(curve: np.ndarray, count: int) -> np.ndarray:
    return np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(curve)), curve)


def _smoothed(noise: np.ndarray) -> np.ndarray:
    """Under a Gaussian of deviation 2, cut at 8 places, the ends mirrored."""
    bell = np.exp(-np.square(np.arange(-8, 9)) / 8)
    mirrored = np.concatenate([noise[7::-1], noise, noise[:-9:-1]])
    return np.convolve(mirrored, bell / bell.sum(), "valid")
