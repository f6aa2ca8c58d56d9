"""Names of a checkpoint's leaves in a file of tensors for other programs."""

from collections.abc import Mapping


def exported_names(leaves: Mapping[str, str], everything: bool) -> dict[str, str]:
    """Return the stored name of each exported leaf by its exported name: dots for slashes.

    Args:
        leaves: the leaves of the checkpoint.
        everything: include the optimizer and the keys; otherwise only parameters and extra/.
    """
    if everything:
        return {name.replace("/", "."): name for name in leaves}
    prefix = "params/"
    params = {name.removeprefix(prefix): name for name in leaves if name.startswith(prefix)}
    extra = {name: name for name in leaves if name.startswith("extra/")}
    return {exported.replace("/", "."): name for exported, name in {**params, **extra}.items()}
