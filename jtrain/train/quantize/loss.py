"""Losses with their linear layers in 8 bits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr

from jtrain.core.loss import Stateful
from jtrain.core.pytree import named_leaves
from jtrain.core.types import LossFn, Params
from jtrain.errors import ConfigError
from jtrain.optim.groups import check_pattern, matches, nearest
from jtrain.train.quantize.rewrite import Product, Rewritten, rewrite_products


@dataclasses.dataclass(frozen=True)
class QuantizedFunction:
    """A function of parameters whose products with some leaves are computed by `product`.

    Any function will do: it is traced, and its program rewritten (`rewrite_products`).
    """

    function: Callable[..., Any]
    product: Product
    products: Sequence[str]  # patterns of leaves
    exclude: Sequence[str]  # patterns of leaves that stay as they are
    key: str  # of the config, for errors

    def __call__(self, params: Params, *rest: Any) -> Any:
        """Call the function.

        Raises:
            ConfigError: if a pattern matches no leaf, or none that has a matrix product.
        """
        closed, shape = jax.make_jaxpr(self.function, return_shape=True)(params, *rest)
        names = list(named_leaves(params))
        chosen = {i for i, name in enumerate(names) if self._chooses(name)}
        made = rewrite_products(closed.jaxpr, len(names), chosen, self.product)
        self._check(names, chosen, made)
        flat = eval_jaxpr(made.jaxpr, closed.consts, *jax.tree.leaves((params, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    def _chooses(self, name: str) -> bool:
        pick = lambda patterns: any(matches(name, pattern) for pattern in patterns)
        return pick(self.products) and not pick(self.exclude)

    def _check(self, names: Sequence[str], chosen: set[int], made: Rewritten) -> None:
        """Raise unless every pattern has an effect."""
        for i, pattern in enumerate(self.exclude):
            check_pattern(f"{self.key}.exclude[{i}]", pattern, names)
        for i, pattern in enumerate(self.products):
            leaves = {n for n, name in enumerate(names) if matches(name, pattern)}
            if not leaves & chosen & made.plain:
                where = f"{self.key}.products[{i}] is {pattern!r}"
                near = nearest(pattern, [names[leaf] for leaf in sorted(made.plain)])
                advice = (
                    f"Nearest that do: {', '.join(near)}. Write one, or a pattern of several."
                    if near
                    else f"No leaf does: leave out {self.key}."
                )
                raise ConfigError(f"{where}: {self._fault(names, leaves, chosen, made)}. {advice}")

    def _fault(
        self, names: Sequence[str], leaves: set[int], chosen: set[int], made: Rewritten
    ) -> str:
        if not leaves:
            return f"it matches none of the {len(names)} leaves that could multiply in 8 bits"
        some = ", ".join(names[leaf] for leaf in sorted(leaves)[:3])
        if not leaves & chosen:
            return f"{self.key}.exclude leaves out all that it matches ({some})"
        why = next((f" ({made.kept[leaf]})" for leaf in sorted(leaves) if leaf in made.kept), "")
        return (
            f"no leaf that it matches ({some}) multiplies activations in a plain matrix "
            f"product{why}"
        )


def quantize_loss(
    loss: LossFn | Stateful,
    product: Product,
    *,
    products: Sequence[str],
    exclude: Sequence[str],
    key: str,
) -> LossFn | Stateful:
    """Return the loss with its products in 8 bits; one that is quantized already begins anew."""
    inner = loss.loss if isinstance(loss, Stateful) else loss
    inner = inner.function if isinstance(inner, QuantizedFunction) else inner
    made = QuantizedFunction(inner, product, tuple(products), tuple(exclude), key)
    return Stateful(made) if isinstance(loss, Stateful) else made
