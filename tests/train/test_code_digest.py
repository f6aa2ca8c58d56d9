"""A resumed or finished run says that its loss or experiment was edited, whatever was edited."""

import functools
import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.train.code_digest import PYTHON, digest_code, find_edited
from jtrain.train.run_result import FINISHED

SCRIPT = """\
import functools

import jax

import own_helpers
from own_helpers import SCALE

STEPS = 100
WEIGHTS = {"a": 0.5, "b": [1.0, 2.0]}


def square(x):
    return x**2


class Penalty:
    factor = 0.1

    def __call__(self, x):
        return self.factor * square(x)


def make(power):
    @jax.jit
    def inner(x, shift=0.25):
        total = own_helpers.half(square(x) - shift) + WEIGHTS["b"][0]
        return total * SCALE + (1 if x in {"p", "q", "r"} else power)

    return inner


penalty = Penalty()
part = functools.partial(make(3), shift=0.5)
losses = [lambda params, batch, rng: make(3)(batch["x"]) + penalty(params["w"]), part]
"""
HELPERS = """\
import own_constants

SCALE = 1.0


def half(x):
    return x / own_constants.TWO
"""
FILES = {"own_script": SCRIPT, "own_helpers": HELPERS, "own_constants": "TWO = 2\n"}


def digests(folder: Path, monkeypatch, **edits: str) -> dict[str, str]:
    """Digest the loss of a script of its own folder, whose modules have other texts."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, text in (FILES | edits).items():
            (folder / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        script = importlib.import_module("own_script")
        return digest_code(script.losses)


EDITS = {
    "a helper of the module": ("own_script", "x**2", "x**3", {"loss"}),
    "a constant in a container": ("own_script", "[1.0, 2.0]", "[1.5, 2.0]", {"loss"}),
    "a value of a closure": ("own_script", "make(3)(", "make(4)(", {"loss"}),
    "a method": ("own_script", "self.factor *", "2 * self.factor *", {"loss"}),
    "an imported constant": ("own_helpers", "SCALE = 1.0", "SCALE = 2.0", {"loss", "own_helpers"}),
    "a comment": ("own_script", "STEPS = 100", "STEPS = 100  # as before\n\n", set()),
    "what the loss does not use": ("own_script", "STEPS = 100", "STEPS = 200", set()),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return digests(tmp_path_factory.mktemp("code") / "first", patch)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found_and_named_by_its_piece(edit, before, tmp_path, monkeypatch):
    file, old, new, expected = EDITS[edit]
    assert FILES[file].count(old) == 1
    after = digests(tmp_path / "edited", monkeypatch, **{file: FILES[file].replace(old, new)})
    assert set(find_edited(before, after)) == expected
    assert set(before) == {"loss", "own_helpers", "own_constants", PYTHON}


def level(power):
    def loss(params, batch, rng):
        return jt.Mean.of(jnp.abs(batch["x"] - params["level"]) ** power, batch["mask"])

    return loss


@pytest.mark.thorough
def test_fit_says_that_the_loss_was_edited(tmp_path, compiled, capfd):
    fit = functools.partial(
        jt.fit,
        params={"level": jnp.float32(0)},
        data={"x": np.arange(8, dtype=np.float32)},
        optimizer="sgd",
        lr=0.1,
        batch=8,
        devices=1,
        directory=tmp_path / "run",
    )
    fit(level(2), steps=2)
    assert fit(level(2), steps=2).why == FINISHED
    assert "edited" not in capfd.readouterr().out
    found = fit(level(4), steps=2)
    for words in (capfd.readouterr().out, found.why):
        assert FINISHED in words
        assert "edited since its last start: loss" in words
    fit(level(4), steps=4)
    assert "edited since its last start: loss" in capfd.readouterr().out
    fit(level(4), steps=6)
    assert "edited" not in capfd.readouterr().out, "it was said"
