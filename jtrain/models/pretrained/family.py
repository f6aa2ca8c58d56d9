"""A family of published models: how its config and its tensors become ours, and back."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from jtrain.models.pretrained.checks import Supported, check_entries
from jtrain.models.pretrained.transforms import SAME, Transform

Values: TypeAlias = dict[str, Any]  # fields of a model's config
HFConfig: TypeAlias = Mapping[str, Any]  # the content of a config.json


class Leaf(NamedTuple):
    """A parameter, the published tensors that it is made from, and the transform."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = SAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of published models.

    Both configs are complete: `hf(model)` then `values` gives the fields of `model` again, which
    is how the family of a model is found.
    """

    name: str
    """The `model_type` of its config.json."""
    architecture: str
    """The architecture of an exported config.json; of timm's, the config gives it."""
    kind: str
    """The `kind` of our config."""
    entries: Supported
    """Values that are computed of each entry that `transformers` reads, or timm."""
    values: Callable[[HFConfig], Values]
    """Fields of our config; raises CheckpointError for values that our model does not have."""
    defaults: HFConfig = dataclasses.field(default_factory=dict)
    """Entries that published files leave out."""
    hf: Callable[[Any], Values]
    """Entries of config.json for our config."""
    leaves: Callable[[Any], Iterator[Leaf]]
    """Table of the parameters of our config."""
    prefix: str = ""
    """Beginning of the tensors' names, which some files leave out."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that hold no weight, such as masks."""
    surplus: Callable[[Any], tuple[str, ...]] = lambda model: ()
    """Beginnings of the names of tensors for which our config has no use, such as other heads."""
    rename: Callable[[Any, str], str] = lambda model, name: name
    """The present name of a tensor, for one of another file; the first argument is our config."""
    timm: frozenset[str] = frozenset()
    """Architectures of timm; empty: a family of `transformers`."""
    mean: float | None = None
    """Mean and deviation of the pixels, where no file beside config.json says another."""

    def read(self, hf: HFConfig) -> Values:
        """Return the fields of our config for a config.json.

        Raises:
            CheckpointError: if an entry is missing, or has a value that is not computed.
        """
        hf = {**self.defaults, **hf}
        check_entries(hf, self.entries)
        return self.values(hf)


def layer_norm_leaves(ours: str, theirs: str) -> Iterator[Leaf]:
    """Yield the scale and the bias of a LayerNorm."""
    yield Leaf(f"{ours}/scale", (f"{theirs}.weight",))
    yield Leaf(f"{ours}/bias", (f"{theirs}.bias",))
