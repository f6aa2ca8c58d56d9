"""8-bit products of an experiment, as its config asks for."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtrain.config.precision import FP8, Precision
from jtrain.core.loss import Stateful
from jtrain.core.types import LossFn
from jtrain.errors import ConfigError
from jtrain.parallel.devices import Device, compute_capability
from jtrain.train.quantize.loss import quantize_loss
from jtrain.train.quantize.products import fp8_product, int8_product

if TYPE_CHECKING:
    from jtrain.train.experiment import Experiment, RunConfig

OLDEST = (8, 9)  # compute capability of Ada; Hopper has 9.0


def quantize_experiment(x: "Experiment", config: "RunConfig") -> "Experiment":
    """Return the experiment with its loss in fp8 where the config says so.

    Raises:
        ConfigError: if whole arrays are scaled and the batch is cut into microbatches.
    """
    precision = config.precision
    if not isinstance(precision, FP8):
        return x
    by_tensor = precision.scaling == "tensor"
    if by_tensor and config.microbatches > 1:
        raise ConfigError(
            f"precision.scaling=tensor scales all rows of a product by the largest number among "
            f"them, so {config.microbatches} microbatches would take other steps than one batch. "
            f"Set precision.scaling=rows, or microbatches=1."
        )
    product = functools.partial(fp8_product, scaling=precision.scaling)
    quantize = functools.partial(
        quantize_loss,
        product=lambda x, w, dims: product(x, w, dims),
        products=precision.products,
        exclude=precision.exclude,
        key="precision",
    )
    couples = "batch" if by_tensor and x.couples == "nothing" else x.couples
    return dataclasses.replace(x, loss=quantize(x.loss), couples=couples)


def int8_loss(loss: LossFn | Stateful, products: Sequence[str]) -> LossFn | Stateful:
    """Return the loss with products in int8, those of fp8 among them; no gradient may be taken."""
    if not products:
        return loss
    return quantize_loss(loss, int8_product, products=products, exclude=(), key="evaluate.int8")


def check_hardware(precision: Precision, devices: Sequence[Device]) -> None:
    """Check that the devices multiply in the precision, where they say what they are.

    Raises:
        ConfigError: for fp8 on an NVIDIA GPU older than Ada and Hopper.
    """
    found = compute_capability(devices[0])
    if isinstance(precision, FP8) and found and found < OLDEST:
        raise ConfigError(
            f"precision.kind=fp8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, "
            f"Hopper, Blackwell), and the first device is {devices[0].device_kind} of "
            f"{found[0]}.{found[1]}. Set precision.kind=bf16."
        )
