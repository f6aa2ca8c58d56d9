"""Any flax nnx module as two pure functions over plain dicts of arrays."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.core.model import Model
from jtrain.core.pytree import named_leaves
from jtrain.core.rows import first_key
from jtrain.core.types import Couples, Dims, Extra, Key, Keys, Params
from jtrain.errors import LossError
from jtrain.errors.user_code import CARRY_EXTRA
from jtrain.models.adapters.switch import RESTS, TRAINS
from jtrain.models.layers.batch_norm import BatchNorm

State: TypeAlias = Any  # nnx.State, whose type parameters beartype warns of
PARTS = (nnx.Param, nnx.RngState, ...)  # differentiated, drawn from, and all the rest
NAMED = ("keys", "mask", *TRAINS, *RESTS)  # what a module's `__call__` may take by name
NO_PARAMS = (
    "the parameter {name} of the module is not among those that `apply` got: {there}. Give it what "
    "`init` of the same model gave: params, extra = model.init(jax.random.key(0))."
)
NO_EXTRA = (
    "the module carries {name} beside its parameters (running statistics, say), and `apply` got "
    f"extra with {{there}}. {CARRY_EXTRA}"
)


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module] | nnx.Module) -> Model:
    """The module that `make` builds, or a module itself, as `Model(init, apply)`.

    `params` (every `nnx.Param`) and `extra` (every other variable: running statistics, caches) are
    plain nested dicts of arrays with string keys, so they are saved, named and sharded like any
    others, and a step over them costs 7 times less Python than one over modules. What is static is
    closed over. No array is made here: the module is only built for real inside `init`. Of a module
    that is given itself, `init` gives the arrays, whatever its key.

    `apply(params, extra, rng, train, *inputs)` switches the module to `train()` or `eval()`,
    refills its random streams from `rng` (stream i gets `fold_in(rng, i)`) and returns the outputs
    and the new `extra`. `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of which it
    takes the first: a layer of flax draws one mask for all the rows it sees, so what a row drops
    depends on how the batch was split; models of this package draw by row instead
    (`jtrain.models.layers.dropout`) and leave `rng` alone.

    The dims of a parameter that the module makes with names, `nnx.Param(value, dims=("width",
    "hidden"))`, are `Model.dims`.

    `method` names what is called of the module where it is not `__call__`.

    `nnx.BatchNorm` makes rows meet: say `couples="batch"`, and hand it the batch's mask
    (`norm(x, mask=mask)`, the mask among the inputs) where batches may be ragged.

    Raises:
        LossError: from `apply`, if the module draws while training and `rng` is None, or if the
            parameters or `extra` are not the module's.
    """
    given = isinstance(make, nnx.Module)
    whole = make if given else nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    apart = SplitModule(whole)

    def init(key: Key) -> tuple[Params, Extra]:
        return (apart if given else SplitModule(make(nnx.Rngs(key)))).arrays()

    def apply(
        params: Params,
        extra: Extra,
        rng: Keys | None,
        train: bool,
        *inputs: Any,
        method: str = "__call__",
        **named: Any,
    ):
        module = apart.module(params, extra, rng, train)
        outputs = getattr(module, method)(*inputs, **named)
        return outputs, apart.extra_of(module)

    taken = inspect.signature(whole.__call__).parameters if callable(whole) else ()
    named = tuple(name for name in NAMED if name in taken)
    return Model(init, apply, _dims(apart.params), named, apart.couples)


class SplitModule:
    """A module taken apart into what is static, its parameters, its random streams and the rest."""

    def __init__(self, module: nnx.Module):
        self._graph, self.params, self._streams, self._extra = nnx.split(module, *PARTS)
        norms = (nnx.BatchNorm, BatchNorm)
        meet = any(isinstance(part, norms) for _, part in nnx.iter_modules(module))
        self.couples: Couples = "batch" if meet else "nothing"
        """What its layers do to the rows of a batch while it trains."""

    def arrays(self) -> tuple[Params, Extra]:
        """Return the parameters and the other arrays, in nested dicts."""
        return _plain(self.params), _plain(self._extra)

    def module(self, params: Params, extra: Extra, rng: Keys | None, train: bool) -> nnx.Module:
        """Return the module with these arrays, switched to training or evaluation.

        Raises:
            LossError: if it draws while training and `rng` is None, or if the arrays are not its.
        """
        arrays = (
            _fill(self.params, params, NO_PARAMS),
            _streams(self._streams, rng, train),
            _fill(self._extra, extra, NO_EXTRA),
        )
        module = nnx.merge(self._graph, *arrays)
        module.train() if train else module.eval()
        return module

    def extra_of(self, module: nnx.Module) -> Extra:
        """Return the arrays of a module that `module` gave, those beside the parameters."""
        return _plain(nnx.state(module, *PARTS)[2])


def _dims(state: State) -> dict[str, Dims]:
    """The names of the dims of each variable that was made with `dims=`, by its name.

    One stacked over layers has a dim before those that it was made with.
    """
    found = {}
    for path, variable in _variables(state):
        if (named := variable.get_metadata().get("dims")) is not None:
            before = variable.get_value().ndim - len(named)
            found["/".join(map(str, path))] = ("layers",) * before + tuple(named)
    return found


def _plain(state: State) -> dict[str, Any]:
    """The arrays of a state in nested dicts; an index in a list becomes a string."""
    tree: dict[str, Any] = {}
    for path, variable in _variables(state):
        *folders, name = map(str, path)
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = variable.get_value()
    return tree


def _fill(like: State, tree: Any, missing: str) -> State:
    """The state with the structure of `like` and the arrays of `tree`.

    Raises:
        LossError: `missing`, if one is not there.
    """

    def at(path):
        inner = tree
        for name in map(str, path):
            inner = _items(inner)
            if name not in inner:
                there = ", ".join(named_leaves(tree)) or "nothing in it"
                raise LossError(missing.format(name="/".join(map(str, path)), there=there))
            inner = inner[name]
        return inner

    filled = [(path, variable.replace(at(path))) for path, variable in _variables(like)]
    return nnx.from_flat_state(filled)


def _items(tree: Any) -> Mapping[str, Any]:
    """Return the children of a node by name; a list's by their index, as `jt.load` gives them."""
    if isinstance(tree, list | tuple):
        return {str(i): child for i, child in enumerate(tree)}
    return tree if isinstance(tree, Mapping) else {}


def _streams(like: State, rng: Keys | None, train: bool) -> State:
    """Random streams that start at `rng`, every counter at 0."""
    if rng is None and train and _variables(like):
        raise LossError(
            "this model draws random numbers while it trains, and `apply` got rng=None. Pass the "
            "loss's `rng` on, or train=False where nothing may be drawn."
        )
    # Without a key it is evaluation, where nothing is drawn.
    rng = jax.random.key(0) if rng is None else first_key(rng)

    def start(stream, variable):
        shape = variable.get_value()
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return variable.replace(jax.random.fold_in(rng, stream))
        return variable.replace(jnp.zeros(shape.shape, shape.dtype))

    filled = [(path, start(i, variable)) for i, (path, variable) in enumerate(_variables(like))]
    return nnx.from_flat_state(filled)


def _variables(state: State) -> list[tuple[tuple[Any, ...], Any]]:
    """Each variable with its path."""
    return list(nnx.to_flat_state(state))
