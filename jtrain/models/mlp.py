"""The config of a multilayer perceptron; importing it imports no flax."""

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
    """Numbers a row, such as an image's pixels; 0: those of the data."""
    widths: tuple[Annotated[int, Field(gt=0)], ...] = (512, 512)
    """Width of each hidden layer; none: a linear classifier."""
    classes: int = Field(default=0, ge=0)
    """Outputs a row; 0: the classes of the data."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the hidden layers."""

    def build(self, placement: Placement = Unplaced()) -> Model:
        """Build the model: `apply(params, {}, x, rng=keys)`.

        Rows b ... are flattened, and the result is logits b c. uint8 is scaled to 0 .. 1. `keys`
        are those of the rows (`jtrain.row_keys`), for dropout.

        Raises:
            ConfigError: if `inputs` or `classes` is still 0.
        """
        if not self.inputs or not self.classes:
            raise ConfigError(
                f"an mlp of inputs={self.inputs} and classes={self.classes} has no size: the "
                f"experiment did not say what its data has. Set model.inputs and model.classes."
            )
        from jtrain.models.adapters.nnx import from_nnx  # flax: 0.6 s, only where a model is built
        from jtrain.models.networks.classifiers import MLPModule

        return from_nnx(lambda rngs: MLPModule(self, placement, rngs))
