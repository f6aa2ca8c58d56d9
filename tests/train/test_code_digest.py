"""A resumed or finished run says that its loss or experiment was edited, whatever was edited."""

import functools
import importlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import CODE, YAML, at_home, trained, write_study

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
losses = {
    "closure": lambda params, batch, rng: make(3)(batch["x"]) + penalty(params["w"]),
    "partial": part,
}


def plot(x):
    return x + STEPS
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
        return digest_code(list(script.losses.values()))


EDITS = {
    "a helper of the module": ("own_script", "x**2", "x**3", {"loss"}),
    "a constant in a container": ("own_script", "[1.0, 2.0]", "[1.5, 2.0]", {"loss"}),
    "a default": ("own_script", "shift=0.25", "shift=0.2", {"loss"}),
    "an argument of a partial": ("own_script", "shift=0.5", "shift=0.6", {"loss"}),
    "a value of a closure": ("own_script", "make(3)(", "make(4)(", {"loss"}),
    "an attribute of a class": ("own_script", "factor = 0.1", "factor = 0.2", {"loss"}),
    "a method": ("own_script", "self.factor *", "2 * self.factor *", {"loss"}),
    "an imported module": ("own_helpers", "x / own", "x * own", {"own_helpers"}),
    "an imported constant": ("own_helpers", "SCALE = 1.0", "SCALE = 2.0", {"loss", "own_helpers"}),
    "a module of a module": ("own_constants", "TWO = 2", "TWO = 3", {"own_constants"}),
    "a comment": ("own_script", "STEPS = 100", "STEPS = 100  # as before\n\n", set()),
    "what the loss does not use": ("own_script", "STEPS = 100", "STEPS = 200", set()),
    "a comment of an imported module": ("own_helpers", "SCALE", "# a scale\nSCALE", set()),
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


@pytest.mark.thorough
def test_another_process_gets_the_same_digests(before, tmp_path):
    """Also with sets of another order, and modules compiled before."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    code = (
        "import own_script; from jtrain.train.code_digest import digest_code; "
        "print(digest_code(list(own_script.losses.values())))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ran.stdout.strip() == str(before)


def test_what_has_no_source_has_a_digest_too():
    names: dict = {}
    exec("f = lambda p, b, r: p + 1\ng = lambda p, b, r: p + 2\nh = lambda p, b, r: p - 1", names)

    class Strange:
        def __getattr__(self, name):
            raise RuntimeError("no attribute")

    model = functools.partial(names["f"], Strange(), jnp.ones(2), np.float32(3), print, jax.nn.relu)
    roots = [names["f"], names["g"], names["h"], model, 3, None, jax.jit(names["f"])]
    assert len({digest_code(root)["loss"] for root in roots}) == len(roots)
    cyclic: list = []
    cyclic.append(cyclic)
    assert digest_code(cyclic) == digest_code(cyclic)


def test_nothing_is_said_of_a_run_without_digests_or_of_another_python():
    now = digest_code(print)
    for known in (None, {}, "abc", {**now, "loss": "0", PYTHON: "3.0"}):
        assert find_edited(known, now) == []


def level(power):
    def loss(params, batch, rng):
        return jt.Mean.of(jnp.abs(batch["x"] - params["level"]) ** power, batch["mask"])

    return loss


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
    capfd.readouterr()
    assert fit(level(2), steps=2).why == FINISHED
    (line,) = capfd.readouterr().out.splitlines()
    assert FINISHED in line
    assert "edited" not in line
    found = fit(level(4), steps=2)
    (line,) = capfd.readouterr().out.splitlines()
    for words in (line, found.why):
        assert FINISHED in words
        assert "edited since its last start: loss" in words
    fit(level(4), steps=4)
    assert "edited since its last start: loss" in capfd.readouterr().out
    fit(level(4), steps=6)
    assert "edited" not in capfd.readouterr().out, "it was said"


@pytest.mark.thorough
def test_a_run_says_that_its_experiment_was_edited(tmp_path, monkeypatch, compiled):
    config = write_study(tmp_path, CODE, YAML)
    at_home(tmp_path, monkeypatch, compiled)
    assert "edited" not in trained("configs/quick.yaml").directory.log.read_text()
    study = config.parents[1] / "experiments" / "quick.py"
    study.write_text(CODE.replace("drop: float = 0.25", "drop: float = 0.25  # of the units"))
    sys.modules.pop("experiments.quick")
    assert trained("configs/quick.yaml").why == FINISHED
    study.write_text(CODE.replace("jnp.tanh", "jnp.sin"))
    sys.modules.pop("experiments.quick")
    assert "edited since its last start: experiments.quick" in trained("configs/quick.yaml").why
    log = trained("configs/quick.yaml", "steps=14").directory.log.read_text()
    assert log.count("edited since its last start: experiments.quick") == 1
