"""Values and functions between processes: what is sent comes out, and the rest is refused."""
# ruff: noqa: E501  (a case reads best on a line)

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pool_functions
import pytest
from comparison import bitwise

from jtrain.errors import ConfigError
from jtrain.server.pool.values import decode, encode, function_name, load_function


def sent(value):
    text, arrays = encode(value)
    return decode(json.loads(json.dumps(text)), arrays)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -2.5, "text", [], (), {}),
        [1, (2, "x"), {"a": [None], 3: {}}],
        {"array": 1, "list": [2]},  # the names that the encoding itself has
    ],
)
def test_plain_values_come_out(value):
    found = sent(value)
    assert found == value
    assert type(found) is type(value)


def test_arrays_come_out_with_dtype_and_bits():
    value = {
        "f32": np.asarray([[1, np.nan], [np.inf, -0.0]], np.float32),
        "bf16": np.asarray([1, 2], ml_dtypes.bfloat16),
        "jax": jnp.arange(3),
        "scalar": np.int64(7),
        "none": np.zeros((0, 4), np.uint8),
        "infinity": float("inf"),
    }
    found = sent(value)
    assert {name: x.dtype for name, x in found.items()} == {
        name: np.asarray(x).dtype for name, x in value.items()
    }
    assert bitwise(found, jax.tree.map(np.asarray, value))


def test_a_random_key_comes_out():
    key = jax.random.key(3)
    draw = lambda key: np.asarray(jax.random.normal(key, (4,)))
    assert bitwise(draw(sent([key])[0]), draw(key))


def test_functions_come_out_by_their_names():
    assert sent(pool_functions.square) is pool_functions.square
    assert function_name(pool_functions.square) == "pool_functions:square"
    assert function_name(pool_functions.loss_and_gradient) == "pool_functions:loss_and_gradient"
    found = sent(functools.partial(optax.sgd, 0.5, momentum=0.9))
    assert (found.func, found.args, found.keywords) == (optax.sgd, (0.5,), {"momentum": 0.9})


def test_a_function_of_a_script_is_imported_without_its_main_part(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "def f(x):\n    return x + 1\nif __name__ == '__main__':\n    raise OSError\n"
    )
    monkeypatch.delitem(sys.modules, "__jtrain_script__", raising=False)
    assert load_function(f"{script}:f")(2) == 3
    monkeypatch.delitem(sys.modules, "__jtrain_script__")


@dataclasses.dataclass
class Other:
    """What no frame has."""

    x: int = 0


def local():
    def inner():
        return 0

    return inner


renamed = pool_functions.square


def shadowed(x):
    return x


first, shadowed = shadowed, pool_functions.square


@pytest.mark.parametrize(
    ("value", "says", "instead"),
    [
        (Other(), "holds a test_values.Other, and arrays, numbers", Other().x),
        ({(1, 2): 3}, r"holds a dict with the key \(1, 2\)", {"1, 2": 3}),
        ({None: 3}, "holds a dict with the key None", {"None": 3}),
        (np.asarray(["x"]), "holds an array of <U1, and bool, int8", np.asarray(["x"]).view(np.uint32)),
        (np.asarray([object()]), "holds an array of object", np.zeros(1)),
        ("x" * 600_000, "holds 600,002 bytes of texts and single numbers", np.frombuffer(b"x" * 600_000, np.uint8)),
        (list(range(200_000)), "Put the numbers into an array", np.asarray(range(200_000))),
        (lambda x: x, "<lambda> of test_values is a lambda, and other processes", renamed),
        (local(), "is defined in another function, and other", pool_functions.square),
        (first, "test_values.shadowed is another object", shadowed),
        (functools.partial(lambda x: x, 1), "is a lambda", functools.partial(renamed, 1)),
        (optax.sgd(0.1), "holds a optax._src.base.GradientTransformation", functools.partial(optax.sgd, 0.1)),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused(value, says, instead):
    with pytest.raises(ConfigError, match=says):
        encode(value)
    encode(instead)


def test_names_that_name_nothing_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="'square' names no function: write module:function"):
        function_name("square")
    with pytest.raises(ConfigError, match="pool_functions:cube cannot be imported"):
        load_function("pool_functions:cube")
    with pytest.raises(ConfigError, match=r"no_module:f cannot be imported .* on PYTHONPATH"):
        load_function("no_module:f")
    with pytest.raises(ConfigError, match=r"missing\.py:f cannot be imported"):
        load_function(f"{Path('missing.py').absolute()}:f")


def test_a_function_of_a_prompt_is_refused(monkeypatch):
    main = type(sys)("__main__")
    exec("def f(): return 1", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigError, match=r"in a notebook or at a prompt.* Write it into a file"):
        function_name(main.f)
