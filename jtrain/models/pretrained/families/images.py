"""Entries and tables that families of image classifiers share."""

from collections.abc import Iterator

from jtrain.models.pretrained import checks
from jtrain.models.pretrained.families.entries import COMMON
from jtrain.models.pretrained.family import HFConfig, Leaf, Values, layer_norm_leaves
from jtrain.models.pretrained.transforms import Transform, linear, single

CONVOLUTION = single(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""Between o i k k and k k i o."""
IMAGE_ENTRIES: checks.Supported = {
    **COMMON,
    "num_channels": (checks.SIZE,),
    "num_labels": (checks.SIZE, None),
    "id2label": (checks.OBJECT, checks.is_list_of(checks.TEXT), None),
}
"""Entries of a classifier of `transformers`."""
COUNTERS = ("num_batches_tracked",)  # of the norms: a fixed momentum does not read them


def label_count(hf: HFConfig) -> int:
    """Return the number of classes of a config.json of transformers, whose default is 2."""
    return hf.get("num_labels") or len(hf.get("id2label") or {}) or 2


def label_entries(classes: int) -> Values:
    """Return names for classes that have none; those of the source are written in their place."""
    names = {str(i): f"LABEL_{i}" for i in range(classes)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def batch_norm_leaves(ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield scale and bias, and the running statistics, which a model carries as `extra`."""
    yield from layer_norm_leaves(ours, theirs)
    yield Leaf(f"extra/{ours}/mean", (f"{theirs}.running_mean",))
    yield Leaf(f"extra/{ours}/var", (f"{theirs}.running_var",))


def convolution_leaves(ours: str, theirs: str, our_norm: str, their_norm: str) -> Iterator[Leaf]:
    """Yield a convolution without a bias, and its norm."""
    yield Leaf(f"{ours}/kernel", (f"{theirs}.weight",), CONVOLUTION)
    yield from batch_norm_leaves(our_norm, their_norm)


def patches(patch: int, channels: int, width: int) -> Transform:
    """Return the transform of a convolution o i k k to a linear map of patches, k k i."""
    inputs = patch * patch * channels
    flat = single(
        lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], -1),
        lambda x: x.reshape(-1, patch, patch, channels).transpose(0, 3, 1, 2),
    )
    return flat.then(linear(inputs, width))


def square(image: tuple[int, int, int]) -> int | list[int]:
    """Return height and width as config.json has them: a number if they are equal."""
    height, width, _ = image
    return height if height == width else [height, width]


def sides(size: int | list[int]) -> tuple[int, int]:
    """Return height and width for an entry of config.json."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
