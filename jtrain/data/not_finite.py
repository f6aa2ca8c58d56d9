"""Where batches first hold a NaN or an infinity."""

import numpy as np

from jtrain.data.calls import Steps


def not_finite(batches: Steps, steps: range) -> str:
    """The first value in the batches of these steps that is not finite; or that all are.

    Steps count from 1 here, as a run says them: step 1 takes batch 0.
    """
    for step in steps:
        batch = batches[step - 1]
        for name, array in batch.items():
            if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all():
                continue
            row, *place = np.argwhere(~np.isfinite(array))[0].tolist()
            where = f" at {place}" if place else ""
            return (
                f"In the batch of step {step}, row {batch['row'][row]} of `{name}` has "
                f"{array[(row, *place)]}{where}."
            )
    return f"In the batches of steps {steps[0]} to {steps[-1]} every value is finite."
