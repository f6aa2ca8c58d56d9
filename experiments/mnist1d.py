"""Digits as curves of 40 numbers: four networks, each as two pure functions."""

import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import Field

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled, Source
from jtrain.losses import cross_entropy
from jtrain.models import classes, from_function
from jtrain.types import Batch, Extra, Key, Metrics, Params, Placement

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
DIMS = ("NWC", "WIO", "NWC")


class CurveDataset(NamedTuple):
    """`curve` (float32, n 40) and `label` (int32, n) for training and for validation."""

    train: Arrays
    test: Arrays


@jt.configclass
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


def uniform(key: Key, shape: tuple[int, ...], fan_in: int) -> dict[str, Array]:
    """Return a kernel and a bias within 1 / sqrt(fan_in), as torch draws them."""
    draw = lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1) / fan_in**0.5
    kernel, bias = jax.random.split(key)
    return {"kernel": draw(kernel, shape), "bias": draw(bias, shape[-1:])}


def linear(params: Params, x: Float[Array, "b i"]) -> Float[Array, "b o"]:
    """Return x W + b."""
    return x @ params["kernel"] + params["bias"][None]


@jt.configclass
class Logistic:
    """A linear map."""

    kind: Literal["logistic"] = "logistic"

    def init(self, key: Key) -> Params:
        """Initialize kernel and bias."""
        return uniform(key, (LENGTH, 10), LENGTH)

    def apply(self, params: Params, x: Float[Array, "b t"]) -> Float[Array, "b c"]:
        """Return the logits."""
        return linear(params, x)


@jt.configclass
class MLP:
    """Two hidden layers, the second added to the first."""

    kind: Literal["mlp"] = "mlp"
    width: int = Field(default=100, gt=0)
    """Numbers in a hidden layer."""

    def init(self, key: Key) -> Params:
        """Initialize three layers."""
        w, keys = self.width, jax.random.split(key, 3)
        shapes = ((LENGTH, w), (w, w), (w, 10))
        return [uniform(k, s, s[0]) for k, s in zip(keys, shapes, strict=True)]

    def apply(self, params: Params, x: Float[Array, "b t"]) -> Float[Array, "b c"]:
        """Return the logits."""
        first, second, head = params
        h = jax.nn.relu(linear(first, x))
        return linear(head, h + jax.nn.relu(linear(second, h)))


@jt.configclass
class CNN:
    """Three convolutions, each of every second place, and a linear map."""

    kind: Literal["cnn"] = "cnn"
    channels: int = Field(default=25, gt=0)
    """Outputs of a convolution."""

    def init(self, key: Key) -> Params:
        """Initialize three convolutions and the linear map."""
        c, keys = self.channels, jax.random.split(key, 4)
        shapes = ((5, 1, c), (3, c, c), (3, c, c), (5 * c, 10))  # size, inputs, outputs
        return [uniform(k, s, math.prod(s[:-1])) for k, s in zip(keys, shapes, strict=True)]

    def apply(self, params: Params, x: Float[Array, "b t"]) -> Float[Array, "b c"]:
        """Return the logits."""
        h, (*convolutions, head) = x[..., None], params
        for layer in convolutions:
            h = jax.lax.conv_general_dilated(h, layer["kernel"], (2,), [(1, 1)], None, None, DIMS)
            h = jax.nn.relu(h + layer["bias"][None, None])
        return linear(head, h.reshape(len(h), -1))


@jt.configclass
class GRU:
    """A recurrent network in both directions, all of whose states a linear map sees."""

    kind: Literal["gru"] = "gru"
    width: int = Field(default=6, gt=0)
    """Numbers in a state."""

    def init(self, key: Key) -> Params:
        """Initialize the maps of input and state for both directions, and the head."""
        w, keys = self.width, jax.random.split(key, 5)
        maps = [uniform(key, (i, 3 * w), w) for key, i in zip(keys, (1, w, 1, w), strict=False)]
        flat = LENGTH * 2 * w
        return {"there": maps[:2], "back": maps[2:], "head": uniform(keys[4], (flat, 10), flat)}

    def apply(self, params: Params, x: Float[Array, "b t"]) -> Float[Array, "b c"]:
        """Return the logits."""
        states = self.states(params["there"], x), self.states(params["back"], x[:, ::-1])[:, ::-1]
        return linear(params["head"], jnp.concatenate(states, 2).reshape(len(x), -1))

    def states(self, params: Params, x: Float[Array, "b t"]) -> Float[Array, "b t w"]:
        """Return the state at each position (Cho et al. 2014, https://arxiv.org/abs/1406.1078)."""
        given, remembered = params

        def step(h, x):
            r, z, n = jnp.split(linear(given, x[:, None]), 3, 1)
            rh, zh, nh = jnp.split(linear(remembered, h), 3, 1)
            z, n = jax.nn.sigmoid(z + zh), jnp.tanh(n + jax.nn.sigmoid(r + rh) * nh)
            return ((1 - z) * n + z * h,) * 2

        return jax.lax.scan(step, jnp.zeros((len(x), self.width)), x.T)[1].swapaxes(0, 1)


class FullBatches:
    """`batches[step]`: every row of `source` in its order, the same arrays at each step.

    The arrays are read once and are read-only, so that they are put on the devices once.

    Raises:
        DataError: no rows.
    """

    ragged = False

    def __init__(self, source: Source):
        self.source, self.size = source, len(source)
        self._rows = InOrder(source, size=self.size)
        self._batch: dict[str, np.ndarray] = {}

    def __getitem__(self, step: int, /) -> dict[str, np.ndarray]:
        if step < 0:
            raise IndexError(f"Steps count from 0; batch {step} was requested.")
        if not self._batch:
            batch = self._rows[0]
            for array in batch.values():
                array.setflags(write=False)
            self._batch = batch  # one assignment: a thread sees no batch or all of it
        return self._batch

    def shard(self, index: int, count: int) -> "FullBatches":
        """Return the same batch, with only the rows of process `index` of `count`."""
        sharded = FullBatches(self.source)
        sharded._rows = self._rows.shard(index, count)
        return sharded


@jt.configclass
class Config(jt.RunConfig):
    """A network and the curves."""

    data: MNIST1D = MNIST1D()
    """The curves."""
    model: Annotated[Logistic | MLP | CNN | GRU, jt.Registry("models", jt.Kind)] = CNN()
    """The network."""

    def build(self, place: Placement) -> jt.Experiment:
        """Build the study; the curves are in memory and the networks too small to shard."""
        train, test = self.data.build()
        shuffled = Shuffled(train, size=self.batch, seed=self.seed)

        def loss(params: Params, batch: Batch, rng: Key | None) -> tuple[jt.Mean, Metrics]:
            logits = self.model.apply(params, batch["curve"])
            return cross_entropy(logits, batch["label"], batch["mask"])

        def predict(params: Params, extra: Extra, batch: Batch) -> dict[str, Array]:
            return classes(self.model.apply(params, batch["curve"]))

        return jt.Experiment(
            init=lambda key: (self.model.init(key), ()),
            loss=loss,
            train=FullBatches(train) if self.batch == len(train) else shuffled,
            valid=InOrder(test, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=from_function(self.model.init, self.model.apply),
            predict=predict,
        )


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
