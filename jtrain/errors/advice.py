"""Advice on errors in user code: a table of (kind of error, pattern, advice)."""

import ast
import builtins
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from jtrain.errors import failing_code
from jtrain.errors.spelling import nearest_name

FULL_TRACEBACK = (
    "The full traceback, JAX's frames among them: JAX_TRACEBACK_FILTERING=off before the command."
)
PRINT = "Print shapes as it is traced, print(x.shape): rows are the first dim of every array."


class UserCodeFailure(NamedTuple):
    """Error in a user's code, with the facts that advice is based on."""

    error: Exception
    what: str
    """Name of the function that was called: "the loss"."""
    link: TracebackType
    """Innermost frame of the user's own code."""
    batch: Mapping[str, Any]
    """Batch that the function was called with; empty without one."""


class ErrorAdvice(NamedTuple):
    """Description of an error in one sentence without its full stop, and one thing to type."""

    happened: str
    advice: str


def numpy_call(failure: UserCodeFailure) -> ErrorAdvice:
    """Name the function of numpy that the line calls; empty if it names none."""
    names = re.findall(r"\bnp\.(\w+)", failing_code(failure.link))
    typed = f"jnp.{names[0]}(...) in the place of np.{names[0]}(...)" if names else "jnp for np"
    happened = f"{failure.what} gives numpy a value that JAX has not computed yet"
    return ErrorAdvice(happened, f"Write {typed}, with `import jax.numpy as jnp`.")


def missing_key(failure: UserCodeFailure) -> ErrorAdvice:
    """Name the existing keys of the mapping that lacks one."""
    key = failure.error.args[0] if failure.error.args else None
    name, mapping = _asked(failure.link)
    if mapping is None and failure.batch and key not in failure.batch:
        name, mapping = "the batch", failure.batch
    if mapping is None or not mapping:
        return ErrorAdvice(f"{failure.what} asks for {key!r}, which does not exist", FULL_TRACEBACK)
    near = nearest_name(str(key), map(str, mapping))
    happened = f"{failure.what} asks for {key!r}, and {name} has {describe_arrays(mapping)}"
    if near:
        return ErrorAdvice(happened, f"Write {near!r}.")
    first = next((name for name in mapping if name not in ("row", "mask")), next(iter(mapping)))
    return ErrorAdvice(happened, f"Write {first!r}, or give the array that name: {{{key!r}: ...}}.")


def describe_arrays(mapping: Mapping[Any, Any]) -> str:
    """Return the keys and their contents; for a batch the keys of its data come first."""
    names = sorted(mapping, key=lambda name: name in ("row", "mask"))
    return ", ".join(_described(name, mapping[name]) for name in names)


def _described(name: Any, value: Any) -> str:
    """Return `x (float32[32,8])`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    kind = f" ({dtype}[{','.join(map(str, shape))}])" if shape is not None and dtype else ""
    return f"{name}{kind}"


def _asked(link: TracebackType) -> tuple[str, Mapping[Any, Any] | None]:
    """Return the mapping in the failing code, such as `batch["image"]`, and its expression."""
    try:
        asked = ast.parse(failing_code(link).strip(), mode="eval").body
    except SyntaxError:
        return "", None
    if not isinstance(asked, ast.Subscript):
        return "", None
    names = {**link.tb_frame.f_globals, **link.tb_frame.f_locals}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            inner = value(node.value)
            return inner.get(node.slice.value) if isinstance(inner, Mapping) else None
        return None

    found = value(asked.value)
    return f"`{ast.unparse(asked.value)}`", found if isinstance(found, Mapping) else None


def unfit_shapes(failure: UserCodeFailure) -> ErrorAdvice:
    """Return advice if one of the shapes has its rows in the wrong dim."""
    rows = len(failure.batch["mask"]) if "mask" in failure.batch else None
    text = str(failure.error)
    shapes = [tuple(map(int, re.findall(r"\d+", s))) for s in re.findall(r"\(([\d, ]+)\)", text)]
    happened = f"{failure.what} brings together arrays whose shapes do not fit"
    if rows is None:
        return ErrorAdvice(happened, PRINT)
    led = [shape for shape in shapes if shape[0] == rows]
    turned = [shape for shape in shapes if shape[0] not in (rows, 1)]
    happened = f"{happened} (the batch has {describe_arrays(failure.batch)})"
    if led and turned and "contracting" not in text:
        return ErrorAdvice(
            happened,
            f"The rows, {rows} here, are the first dim of every array, and one begins with "
            f"{turned[0][0]}: turn it by x.T, or sum over its last dim by axis=-1.",
        )
    return ErrorAdvice(happened, PRINT)


def unknown_name(failure: UserCodeFailure) -> ErrorAdvice:
    """Suggest the nearest name: a variable, or an attribute of a module or an object."""
    error = failure.error
    frame, name = failure.link.tb_frame, str(getattr(error, "name", "") or "")
    if isinstance(error, AttributeError):
        names: Sequence[str] = [x for x in dir(getattr(error, "obj", None)) if x[0] != "_"]
        nn = sys.modules.get("jax.nn")  # imported where it is needed
        if getattr(error.obj, "__name__", "") == "jax.numpy" and hasattr(nn, name):
            return ErrorAdvice(f"{failure.what} failed", f"Write jax.nn.{name}.")
    else:
        names = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
    near = nearest_name(name, names)
    return ErrorAdvice(
        f"{failure.what} failed", f"Did you mean {near}?" if near else FULL_TRACEBACK
    )


def subscripted_module(failure: UserCodeFailure) -> ErrorAdvice:
    """Advise that the loss gets the module itself if an nnx module is trained."""
    if not re.search(r"\[", failing_code(failure.link)):
        return ErrorAdvice(f"{failure.what} failed", FULL_TRACEBACK)
    return ErrorAdvice(
        f"{failure.what} takes an object for a dict",
        "Where an nnx module is trained the loss gets the module itself: def loss(module, batch, "
        'rng): outputs = module(batch["x"]). To get arrays, give fit the arrays.',
    )


def missing_path(failure: UserCodeFailure) -> ErrorAdvice:
    """Name the files beside a missing path."""
    error = failure.error
    path = Path(str(getattr(error, "filename", None) or ""))
    reason = getattr(error, "strerror", None) or "missing"
    happened = f"{failure.what} cannot open {path or 'a file'} ({reason.lower()})"
    above = next((p for p in path.parents if p.is_dir()), Path())
    present = sorted(os.listdir(above)) if os.access(above, os.R_OK) else []
    missing, *rest = path.parts[len(above.parts) :] or [""]  # the first missing one
    near = nearest_name(missing, present)
    where = f"It was looked for in {above.resolve()}"
    if near:
        return ErrorAdvice(happened, f"{where}. Did you mean {above.joinpath(near, *rest)}?")
    listed = f", which has {', '.join(present[:8])}" if present else ""
    relative = (
        "" if path.is_absolute() else "; a relative path counts from where you type the command"
    )
    return ErrorAdvice(
        happened, f"{where}{listed}{relative}. Write the path in full: {path.absolute()}."
    )


CARRY_EXTRA = (
    "Let jt.classifier(model), or another of those helpers, carry it; or write a jt.stateful(loss) "
    "of (params, extra, batch, rng), and start from both that init gives: params, extra = "
    "model.init(key)."
)


class AdviceRule(NamedTuple):
    """Row of the table: an error of this kind whose text has this pattern."""

    kind: str  # of the class, or of one above it; several are joined by |
    pattern: str
    advise: Callable[[UserCodeFailure], ErrorAdvice]


def advise(failure: UserCodeFailure) -> ErrorAdvice:
    """Return the advice of the first row that matches, or how to see the full traceback."""
    kinds = {cls.__name__ for cls in type(failure.error).__mro__}
    text = str(failure.error)
    for row in TABLE:
        if kinds.intersection(row.kind.split("|")) and re.search(row.pattern, text):
            return row.advise(failure)
    return ErrorAdvice(f"{failure.what} failed", FULL_TRACEBACK)


def _rule(kind: str, pattern: str, happened: str, typed: str) -> AdviceRule:
    return AdviceRule(kind, pattern, lambda f: ErrorAdvice(f"{f.what} {happened}", typed))


TABLE = (
    _rule(
        "TracerBoolConversionError",
        "",
        "asks whether a value holds that JAX has not computed yet (`if`, `while`, `and`)",
        "Choose by jnp.where(condition, a, b); call one of two functions by "
        "jax.lax.cond(condition, f, g, x).",
    ),
    _rule(
        "NonConcreteBooleanIndexError",
        "",
        "picks values by a mask, so that their number depends on the mask",
        "Keep the shape: jnp.where(mask, x, 0); or weigh the rows: jt.Mean.of(values, mask).",
    ),
    _rule(
        "TracerIntegerConversionError",
        "",
        "takes a value that JAX has not computed yet for an index, a size or a range",
        "Take sizes from shapes, x.shape[0]; pick by jnp.take(x, i, axis=0).",
    ),
    AdviceRule("TracerArrayConversionError", "", numpy_call),
    _rule(
        "ConcretizationTypeError",
        "",
        "takes a value that JAX has not computed yet for a Python number (float, int, .item())",
        'Print it by jax.debug.print("{}", x); to have it in the history, return it as a '
        'metric: return loss, {"name": jt.Mean.of(values, batch["mask"])}.',
    ),
    _rule(
        "UnexpectedTracerError",
        "",
        "uses a value that was stored while it was traced before (in a list, an attribute)",
        'Return what is needed later as a metric: return loss, {"name": '
        'jt.Mean.of(values, batch["mask"])}.',
    ),
    _rule(
        "ScopeCollectionNotFound|ValueError",
        "collection is empty|Unable to retrieve state|No value for '",
        "uses a model that carries more than parameters (running statistics), without that",
        CARRY_EXTRA,
    ),
    _rule(
        "TypeError",
        "concrete values of integer type",
        "takes a value that JAX has not computed yet for a size",
        "Take sizes from shapes: x.shape[0].",
    ),
    AdviceRule("KeyError", "", missing_key),
    _rule(
        "NameError",
        "axis name",
        "adds up over devices by itself (psum, pmean, axis_index)",
        "Leave that to the step, which does so with what the loss returns for its rows: "
        'jt.Mean.of(values, batch["mask"]).',
    ),
    AdviceRule("NameError|AttributeError", "", unknown_name),
    AdviceRule("TypeError", "object is not subscriptable", subscripted_module),
    _rule(
        "TypeError",
        "(list|tuple) indices must be integers",
        "asks a list for a name",
        'Count, params[0]; or give a dict, {"w": ...}, for what has names.',
    ),
    _rule(
        "TypeError",
        "subdtype of <class 'numpy.integer'>|must be of integer type|must have integer",
        "is given numbers with a fraction where whole numbers count classes or places",
        "Make them whole where the data is made: y.astype(np.int32).",
    ),
    _rule(
        "TypeError",
        "PRNG key type <class 'NoneType'>|PRNG key.*None",
        "draws without a key: `rng` is None in an evaluation, where nothing is to be drawn",
        "Draw where there is one: x = x if rng is None else dropped(x, rng).",
    ),
    _rule(
        "TypeError",
        "must be Tensor, not|expected Tensor",
        "gives torch an array of JAX, and torch would compute no gradient of it",
        "Write it with jax.numpy (jnp) or optax: "
        "optax.softmax_cross_entropy_with_integer_labels for torch's cross_entropy.",
    ),
    AdviceRule("TypeError", "incompatible shapes|contracting dimensions", unfit_shapes),
    AdviceRule(
        "ValueError", "(?i)incompatible shapes|(could not|cannot) be broadcast", unfit_shapes
    ),
    _rule(
        "TypeError",
        "is not a valid JAX (array )?type|Cannot interpret value of type",
        "gives JAX what is not an array of numbers",
        "Make it one: jnp.asarray(x), np.asarray(x) of a list, x.numpy() of a torch tensor.",
    ),
    *(
        _rule(
            kind,
            pattern,
            "would exchange arrays between devices, or could split its result in several ways",
            "That is an error with parallel.explicit=true. Say what is meant: "
            "jax.sharding.reshard(x, P()) is whole on each device, x.at[i].get(out_sharding=...) "
            "and jnp.einsum(..., out_sharding=...) split as you say, jnp.zeros_like(x) is split as "
            "x is; or leave it to the compiler: parallel.explicit=false.",
        )
        for kind, pattern in (
            ("ShardingTypeError", ""),
            ("ValueError", "out_sharding"),
            ("TypeError", r"(?s)body function carry.*\[[^]]*@"),
        )
    ),
    AdviceRule("OSError", "", missing_path),
)
