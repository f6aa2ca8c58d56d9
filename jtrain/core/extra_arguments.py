"""Extra arguments of an optimizer's update: each transformation gets those that it names."""

import inspect
import re
from typing import Any

import optax

from jtrain.core.pytree import named_leaves
from jtrain.errors import ConfigError

_REFUSED = re.compile(
    r"unexpected keyword argument|missing \d+ required keyword|must be (provided|given|specified)"
)


def with_named_arguments(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose update takes any extra arguments, and uses those that it names.

    Raises:
        ConfigError: in the update, if the optimizer needs another argument, or its updates have
            other shapes than the gradients.
    """
    check_optimizer(optimizer)
    optimizer = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def update(updates: Any, state: Any, params: Any = None, **known: Any) -> Any:
        given = {name: x for name, x in known.items() if takes_any or name in parameters}
        try:
            found = optimizer.update(updates, state, params, **given)
        except (TypeError, ValueError) as error:
            if not _REFUSED.search(str(error)):
                raise
            raise ConfigError(
                f"the optimizer's update refuses its arguments: {str(error).rstrip('.')}. It is "
                f"given {', '.join(known)}. Write **extra_args in its signature, and bind what "
                f"else it needs: functools.partial(update, NAME=...)."
            ) from None
        _check_shapes(updates, found[0])
        return found

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError unless it is an optax transformation."""
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
    made = f"optax.{name if callable(getattr(optax, str(name), None)) else 'adamw'}(1e-3)"
    made = "optimizer.build(steps)" if hasattr(optimizer, "build") else made
    raise ConfigError(
        f"an optimizer is an optax transformation, and not a {type(optimizer).__name__}: write "
        f"{made}."
    )


def _check_shapes(grads: Any, updates: Any) -> None:
    found = named_leaves(updates)
    for name, grad in named_leaves(grads).items():
        if name not in found or found[name].shape != grad.shape:
            shape = list(found[name].shape) if name in found else "missing"
            raise ConfigError(
                f"the optimizer's update of {name or 'the parameter'} is {shape}, and its gradient "
                f"is {list(grad.shape)}: jtrain gives the gradient of the whole batch, and not of "
                f"each row. Take another optimizer."
            )
