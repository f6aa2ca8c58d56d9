"""The values of a classifier of vectors; importing them imports no flax."""

from typing import Annotated, Literal

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.core.model import Model
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import ConfigError


@configclass
class MLP:
    """A multilayer perceptron: linear maps with ReLU between them."""

    kind: Literal["mlp"] = "mlp"
    inputs: int = Field(default=0, ge=0)
    """Numbers a row, an image's pixels say; 0 takes what the data has."""
    widths: tuple[Annotated[int, Field(gt=0)], ...] = (512, 512)
    """Numbers in each hidden layer; none makes a linear classifier."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0 takes what the data has."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Chance that a number of a hidden layer is dropped."""

    def build(self, place: Placement = Unplaced()) -> Model:
        """`apply(params, {}, rng, train, x, keys)` gives logits b c of rows b ..., flattened.

        uint8 is scaled to 0 .. 1. `keys` are the rows' (`jtrain.row_keys`), or None where nothing
        is dropped; `rng` is not used.

        Raises:
            ConfigError: if `inputs` or `classes` is still 0.
        """
        if not self.inputs or not self.classes:
            raise ConfigError(
                f"an mlp of inputs={self.inputs} and classes={self.classes} has no size: the "
                f"experiment did not say what its data has. Set model.inputs and model.classes."
            )
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.mlp import MLPModule

        return from_nnx(lambda rngs: MLPModule(self, place, rngs))
