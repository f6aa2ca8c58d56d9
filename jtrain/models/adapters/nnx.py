"""Any flax nnx module as two pure functions over plain dicts of arrays."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from jtrain.core.loss import Stateful
from jtrain.core.model import Model
from jtrain.core.pytree import named_leaves
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Dims, Extra, Key, Keys, Metrics, Params, RowsInteract
from jtrain.errors import LossError
from jtrain.errors.advice import CARRY_EXTRA
from jtrain.errors.user_code import check_takes
from jtrain.models.adapters import (
    EVALUATES,
    OF_BATCH,
    TRAINS,
    first_key,
    keys_argument,
    make_apply,
    stateful_output,
)
from jtrain.models.adapters.cpu_pools import fast_pools
from jtrain.models.layers.norms import BatchNorm

State: TypeAlias = Any  # nnx.State, whose type parameters beartype warns about
PARTS = (nnx.Param, nnx.RngState, ...)  # differentiated, random, and the rest
NAMED = (*OF_BATCH, *TRAINS, *EVALUATES)  # what a module's `__call__` may take by name
NO_PARAMS = (
    "the parameter {name} of the module is not among those that `apply` got: {present}. Pass what "
    "`init` of the same model returned: params, extra = model.init(jax.random.key(0))."
)
NO_EXTRA = (
    "the module carries {name} beside its parameters (running statistics, say), and `apply` got "
    f"extra with {{present}}. {CARRY_EXTRA}"
)


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module] | nnx.Module) -> Model:
    """Return the module that `make` builds, or a module itself, as `Model(init, apply)`.

    `params` (every `nnx.Param`) and `extra` (every other variable: running statistics, caches) are
    plain nested dicts of arrays with string keys, so they are saved, named and sharded like any
    others, and a step over them costs 7 times less Python than one over modules. Static attributes
    are closed over. No array is made here: `init` builds the module. For a module itself, `init`
    returns the module's arrays, whatever the key.

    `apply(params, extra, *inputs, rng=None, train=None)` switches the module to `train()` or
    `eval()`, refills its random streams from `rng` (stream i gets `fold_in(rng, i)`) and returns
    the outputs and the new `extra`. `rng` is a key, or the keys of the rows (`jtrain.row_keys`), of
    which a stream uses the first: a flax layer draws one mask for all rows of a call, so the
    dropout of a row depends on how the batch is split. A module whose method takes `keys`, as those
    of this package do, gets the keys of the rows and draws by row
    (`jtrain.models.layers.dropout`).

    Named dims of parameters, `nnx.Param(value, dims=("width", "hidden"))`, become `Model.dims`.

    `method` is the name of the module's method to call instead of `__call__`.

    `nnx.BatchNorm` couples rows: declare `rows_interact="batch"`, and pass it the batch's mask
    (`norm(x, mask=mask)`, the mask among the inputs) where batches may be ragged.

    Raises:
        LossError: from `apply`, if the module draws in training and `rng` is None, or if the
            parameters or `extra` are not the module's.
    """
    given = isinstance(make, nnx.Module)
    module_like = make if given else nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    split = SplitModule(module_like)

    def init(key: Key) -> tuple[Params, Extra]:
        return (split if given else SplitModule(make(nnx.Rngs(key)))).arrays()

    def call(
        params: Params, extra: Extra, inputs: Any, rng: Any, train: bool, method="__call__", **named
    ):
        module = split.module(params, extra, rng, train)
        function = getattr(module, method)
        outputs = function(*inputs, **named, **keys_argument(function, rng))
        return outputs, split.extra_of(module)

    taken = inspect.signature(module_like.__call__).parameters if callable(module_like) else ()
    named = tuple(name for name in NAMED if name in taken)
    # The networks of this package have no such pool, and start faster if traced once.
    own = type(module_like).__module__.startswith("jtrain.")
    apply = make_apply(call) if own else fast_pools(make_apply(call))
    dims, linear = _dims(split.params), _linear(split.params)
    return Model(init, apply, dims, named, split.rows_interact, linear)


class SplitModule:
    """A module split into its graph, its parameters, its random streams and its other arrays."""

    def __init__(self, module: nnx.Module):
        module = nnx.merge(*nnx.split(module))  # whose module stays as it is
        name_scopes(module)
        self._graph, self.params, self._streams, self._extra = nnx.split(module, *PARTS)
        coupled = any(_interacts(part) for _, part in nnx.iter_modules(module))
        self.rows_interact: RowsInteract = "batch" if coupled else "never"
        """The coupling of a batch's rows by the layers in training."""

    def arrays(self) -> tuple[Params, Extra]:
        """Return the parameters and the other arrays, in nested dicts."""
        return _plain(self.params), _plain(self._extra)

    def module(self, params: Params, extra: Extra, rng: Keys | None, train: bool) -> nnx.Module:
        """Return the module with these arrays, switched to training or evaluation.

        Raises:
            LossError: if it draws in training and `rng` is None, or if the arrays do not match.
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
        """Return the arrays beside the parameters of a module that `module` returned."""
        return _plain(nnx.state(module, *PARTS)[2])


def _interacts(part: Any) -> bool:
    """Return whether a layer takes statistics over the rows of a batch in training."""
    return isinstance(part, nnx.BatchNorm) or (isinstance(part, BatchNorm) and not part.frozen)


def _dims(state: State) -> dict[str, Dims]:
    """Return the named dims of each variable that was made with `dims=`, by its name.

    A variable stacked over layers has the dim `layers` first.
    """
    found = {}
    for path, variable in _variables(state):
        if (named := variable.get_metadata().get("dims")) is not None:
            before = variable.get_value().ndim - len(named)
            found["/".join(map(str, path))] = ("layers",) * before + tuple(named)
    return found


def _linear(state: State) -> dict[str, bool]:
    """Return the kernels of `Linear` layers: whether each is stored as (outputs, inputs)."""
    return {
        "/".join(map(str, path)): variable.get_metadata()["transposed"]
        for path, variable in _variables(state)
        if "transposed" in variable.get_metadata()
    }


def _plain(state: State) -> dict[str, Any]:
    """Return the arrays of a state in nested dicts; an index of a list becomes a string."""
    return unflatten_dict({tuple(map(str, path)): x.get_value() for path, x in _variables(state)})


def _fill(like: State, tree: Any, missing: str) -> State:
    """Return the state with the structure of `like` and the arrays of `tree`.

    Raises:
        LossError: with the message `missing`, if an array is missing.
    """

    def at(path):
        inner = tree
        for name in map(str, path):
            if isinstance(inner, list | tuple):  # as `jt.load` makes
                inner = {str(i): child for i, child in enumerate(inner)}
            if not isinstance(inner, Mapping) or name not in inner:
                present = ", ".join(named_leaves(tree)) or "nothing in it"
                raise LossError(missing.format(name="/".join(map(str, path)), present=present))
            inner = inner[name]
        return inner

    filled = [(path, variable.replace(at(path))) for path, variable in _variables(like)]
    return nnx.from_flat_state(filled)


def _streams(like: State, rng: Keys | None, train: bool) -> State:
    """Return random streams that start at `rng`, with every counter at 0."""
    if rng is None and train and _variables(like):
        raise LossError(
            "this model draws random numbers in training, and `apply` got rng=None. Pass the "
            "loss's `rng`, or train=False."
        )
    # Without a key the module evaluates and draws nothing.
    rng = jax.random.key(0) if rng is None else first_key(rng)

    def start(stream, variable):
        shape = variable.get_value()
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return variable.replace(jax.random.fold_in(rng, stream))
        return variable.replace(jnp.zeros(shape.shape, shape.dtype))

    filled = [(path, start(i, variable)) for i, (path, variable) in enumerate(_variables(like))]
    return nnx.from_flat_state(filled)


def _variables(state: State) -> list[tuple[tuple[Any, ...], Any]]:
    """Return each variable with its path."""
    return list(nnx.to_flat_state(state))


def module_loss(loss: Callable[..., Any], module: SplitModule) -> Stateful:
    """Return a loss of (module, batch, rng) as a loss of the module's arrays.

    With a key the module is in training mode, with its random streams filled from the keys of the
    rows. The layers' state (running statistics) is carried on.

    Raises:
        LossError: if `loss` does not take these arguments.
    """
    check_takes(loss, ("module", "batch", "rng"), "the nnx module's loss")

    def call(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Any, Metrics, Extra]:
        keys = row_keys(rng, batch)
        inner = module.module(params, extra, keys, rng is not None)
        result = loss(inner, batch, rng)
        pair = type(result) is tuple and len(result) == 2
        value, metrics = result if pair else (result, {})
        return value, metrics, stateful_output(extra, module.extra_of(inner), batch["mask"])

    return Stateful(fast_pools(call))


SCOPE = "scope_name"  # a static attribute of the module, so it survives split and merge


def name_scopes(module: nnx.Module) -> None:
    """Make each module inside `module` run in a named scope: its path from the module around it.

    The modules get a subclass of their class with the same name, whose `__call__` enters the scope.
    No array is touched.
    """
    fits = lambda part: callable(part) and not hasattr(part, SCOPE)
    paths = {path for path, part in nnx.iter_modules(module) if path and fits(part)}
    for path, part in list(nnx.iter_modules(module)):
        if path not in paths:
            continue
        around = max((p for p in paths if p == path[: len(p)] and p != path), key=len, default=())
        part.__class__ = _scoped_class(type(part))
        setattr(part, SCOPE, "/".join(map(str, path[len(around) :])))


@functools.cache
def _scoped_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    plain_call: Any = kind.__call__

    @functools.wraps(plain_call)
    def call(self, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(getattr(self, SCOPE)):
            return plain_call(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    scoped = type(kind.__name__, (kind,), names)
    scoped.__qualname__ = kind.__qualname__
    return scoped
