"""Layout in which a trained run is used: its own, or one that fits the available devices."""

import dataclasses

import jax

from jtrain.errors import UserError
from jtrain.parallel import FSDP, Auto, Layout, Mirrored, Single, check_divides
from jtrain.train.experiment import RunConfig


def fit_layout_to_devices(config: RunConfig, stored: RunConfig | None) -> tuple[RunConfig, str]:
    """Return the config with a layout that fits, and a line about it if the layout changed.

    A given layout other than the run's own is not changed.

    Args:
        stored: the config that the run was trained with.
    """
    if stored is None or config.parallel != stored.parallel or _fits(config.parallel, config):
        return config, ""
    for count in range(jax.local_device_count(), 0, -1):
        layout = _over(count, config)
        if _fits(layout, config):
            return dataclasses.replace(config, parallel=layout), (
                f"trained under parallel.kind={config.parallel.kind}, which does not fit the "
                f"{jax.device_count()} device{'s' * (jax.device_count() > 1)} here: used as "
                f"{layout.kind} over {count * jax.process_count()}"
            )
    return config, ""


def _over(count: int, config: RunConfig) -> Layout:
    """Return a layout over `count` devices of each process; a sharded state stays sharded."""
    original = config.parallel
    timeout = original.start_timeout
    if count * jax.process_count() == 1:
        return Single(start_timeout=timeout)
    if isinstance(original, Single) or (isinstance(original, Mirrored) and not original.zero):
        return Mirrored(devices=count, start_timeout=timeout)
    return FSDP(devices=count, start_timeout=timeout)


def _fits(layout: Layout | Auto, config: RunConfig) -> bool:
    """Return whether there are enough devices, and the rows of a batch divide by them."""
    if isinstance(layout, Auto):  # chooses a layout that fits
        return True
    try:
        shares = layout.build().shares
        check_divides(config.batch, shares, config.microbatches)
        check_divides(config.evaluate.batch or config.batch, shares, 1)
    except UserError:
        return False
    return True
