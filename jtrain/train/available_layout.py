"""The layout in which a trained run is used: its own, or one for the devices that are there."""

import dataclasses

import jax

from jtrain.errors import UserError
from jtrain.parallel import FSDP, Auto, Layout, Mirrored, Single, check_divides
from jtrain.train.experiment import RunConfig


def usable(config: RunConfig, stored: RunConfig | None) -> tuple[RunConfig, str]:
    """Return the config with a layout that fits, and a line that says so if it is another.

    A layout that was asked for, other than the run's own, is taken as it is.

    Args:
        stored: the config that the run was trained by.
    """
    if stored is None or config.parallel != stored.parallel or _fits(config.parallel, config):
        return config, ""
    for count in range(jax.local_device_count(), 0, -1):
        layout = _over(count, config)
        if _fits(layout, config):
            there = count * jax.process_count()
            return dataclasses.replace(config, parallel=layout), (
                f"trained under parallel.kind={config.parallel.kind}, which does not fit the "
                f"{jax.device_count()} device{'s' * (jax.device_count() > 1)} here: used as "
                f"{layout.kind} over {there}"
            )
    return config, ""


def _over(count: int, config: RunConfig) -> Layout:
    """A layout over `count` devices of each process; a state that was split stays so."""
    asked = config.parallel
    if count * jax.process_count() == 1:
        return Single(start_timeout=asked.start_timeout)
    if isinstance(asked, Single) or (isinstance(asked, Mirrored) and not asked.zero):
        return Mirrored(devices=count, start_timeout=asked.start_timeout)
    return FSDP(devices=count, start_timeout=asked.start_timeout)


def _fits(layout: Layout | Auto, config: RunConfig) -> bool:
    """Whether the devices are enough, and the rows of a batch divide into them."""
    if isinstance(layout, Auto):  # which finds one
        return True
    try:
        shares = layout.build().shares
        check_divides(config.batch, shares, config.microbatches)
        check_divides(config.evaluate.batch or config.batch, shares, 1)
    except UserError:
        return False
    return True
