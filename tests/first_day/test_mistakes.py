"""The mistakes of a first day, anywhere: the line, one sentence, one thing to type, exit code 2."""

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from plain_environ import plain_environ
from quick_study import CODE, YAML, at_home, write_study

import jtrain as jt
from jtrain.cli import main
from jtrain.errors import ConfigError, UserError
from jtrain.errors.user_code import check_takes, user_code
from jtrain.models.adapters.nnx import from_nnx

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
W = {"w": np.zeros((4, 2), np.float32)}
ce = optax.softmax_cross_entropy_with_integer_labels
HERE = Path(__file__).name


def good(params, batch, rng):
    return jt.Mean.of(ce(batch["x"] @ params["w"], batch["y"]), batch["mask"])


def fit(loss: Any = good, params: Any = W, data: Any = (X, Y), **more: Any) -> jt.Fitted:
    named = {"steps": 1, "batch": 8, "parallel": "single", "quiet": True}
    return jt.fit(loss, params, data, **(named | more))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.outer = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.norm(self.inner(x)))


def float_of_a_loss():
    def loss(params, batch, rng):
        total = good(params, batch, rng)
        print(float(total.total))
        return total

    fit(loss)


def an_if_on_an_array():
    def loss(params, batch, rng):
        values = ce(batch["x"] @ params["w"], batch["y"])
        if values.mean() > 1:
            values = values / 2
        return jt.Mean.of(values, batch["mask"])

    fit(loss)


def numpy_in_the_loss():
    fit(lambda p, b, rng: jt.Mean.of(ce(np.asarray(b["x"]) @ p["w"], b["y"]), b["mask"]))


def a_mask_as_an_index():
    def loss(params, batch, rng):
        rows = batch["x"][batch["mask"]]
        return jt.Mean.of(ce(rows @ params["w"], batch["y"]), batch["mask"])

    fit(loss)


def a_wrong_batch_key():
    fit(lambda p, b, rng: jt.Mean.of(ce(b["image"] @ p["w"], b["y"]), b["mask"]))


def float_labels():
    fit(data=(X, Y.astype(np.float32)))


def transposed_logits():
    fit(lambda p, b, rng: jt.Mean.of(ce((b["x"] @ p["w"]).T, b["y"]), b["mask"]))


def a_loss_of_two_arguments():
    fit(lambda params, batch: good(params, batch, None))


def a_value_kept_from_a_trace():
    kept = []

    def loss(params, batch, rng):
        kept.append(batch["x"])
        return good(params, {**batch, "x": kept[0]}, rng)

    fit(loss)


def a_batch_norm_without_extra():
    model = from_nnx(Net)
    params, _ = model.init(jax.random.key(0))

    def loss(params, batch, rng):
        logits, _ = model.apply(params, {}, batch["x"], train=rng is not None)
        return jt.Mean.of(ce(logits, batch["y"]), batch["mask"])

    fit(loss, params)


def a_draw_in_an_evaluation():
    def loss(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        return good(params, {**batch, "x": batch["x"] * keep}, rng)

    fit(loss, valid=(X, Y))


def a_name_that_is_not_there():
    fit(lambda params, batch, rng: good(params, batch, rgn))


def epochs_and_steps():
    fit(steps=10, epochs=2)


def a_model_in_the_place_of_the_loss():
    fit(Net(nnx.Rngs(0)), X, Y)


def a_row_that_is_not_finite():
    x = X.copy()
    x[3, 2] = np.nan
    fit(data=(x, Y), steps=100)


class Case(NamedTuple):
    make: Callable[[], None]
    types: str
    """What is to be typed."""
    line: str = ""
    """The line of the user's that is shown; empty where it is the call alone."""
    found: str = ""
    """What was found, where that differs from one to the next."""


CASES = [
    Case(float_of_a_loss, 'jax.debug.print("{}", x)', "print(float(total.total))"),
    Case(an_if_on_an_array, "jnp.where(condition, a, b)", "if values.mean() > 1:"),
    Case(numpy_in_the_loss, "jnp.asarray(...) in the place of np.asarray(...)", 'np.asarray(b["x"])'),
    Case(a_mask_as_an_index, "jnp.where(mask, x, 0)", 'batch["x"][batch["mask"]]'),
    Case(a_wrong_batch_key, "Write 'x', or give the array that name: {'image': ...}", 'b["image"]',
         "asks for 'image', and `b` has x (float32[8,4]), y (int32[8])"),
    Case(float_labels, "y.astype(np.int32)", 'ce(batch["x"] @ params["w"], batch["y"])'),
    Case(transposed_logits, "turn it", 'ce((b["x"] @ p["w"]).T, b["y"])',
         "The rows, 8 here, are the first dim of every array, and one begins with 2"),
    Case(a_loss_of_two_arguments, "def loss(params, batch, rng):", "in <lambda>",
         "is called as loss(params, batch, rng), and it takes (params, b"),
    Case(a_value_kept_from_a_trace, 'return loss, {"name": jt.Mean.of(values, batch["mask"])}'),
    Case(a_batch_norm_without_extra, "jt.classifier(model)", "model.apply(params, {}, batch",
         "the module carries norm/mean beside its parameters"),
    Case(a_draw_in_an_evaluation, "x if rng is None else", "jax.random.bernoulli(rng"),
    Case(a_name_that_is_not_there, "Did you mean rng?", "good(params, batch, rgn)"),
    Case(epochs_and_steps, "Write epochs=5, or steps=1000"),
    Case(a_model_in_the_place_of_the_loss, "jt.fit(jt.classifier(model), model, (x, y))"),
    Case(a_row_that_is_not_finite, "x = np.nan_to_num(x)", found="row 3 of `x` has nan at [2]"),
]  # fmt: skip


LONG = {
    *(a_batch_norm_without_extra, a_draw_in_an_evaluation, a_row_that_is_not_finite),
    a_value_kept_from_a_trace,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.make.__name__, marks=[pytest.mark.thorough] * (c.make in LONG))
        for c in CASES
    ],
)
def test_a_mistake_is_told_by_its_line_what_was_found_and_what_to_type(case: Case):
    with pytest.raises(UserError) as caught:
        case.make()
    told = str(caught.value)
    assert case.types in told, told
    assert case.found in told, told
    assert case.line in told
    assert caught.value.code == 2
    shown = traceback.extract_tb(caught.value.__traceback__)
    inside = f"{Path(jt.__file__).parent}/"
    assert sum(frame.filename.startswith(inside) for frame in shown) <= 3, "no inside of jtrain"
    assert not any("/jax/" in frame.filename for frame in shown)
    if case.line:
        assert f'{HERE}", line' in told
    assert len(told.splitlines()) <= 12
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "JAX has removed its internal frames" not in notes


# ruff: noqa: E501  (a case reads best on a line)
CONFIG = "configs/quick.yaml"
HAND_OVER = 'return cross_entropy(x @ params["down"], batch["label"], batch["mask"])'


class Command(NamedTuple):
    name: str
    types: str
    words: tuple[str, ...] = ("run", CONFIG)
    edit: tuple[str, str] = ("", "")  # of the experiment


COMMANDS = [
    Command("spaces around =", "write KEY=VALUE", ("run", CONFIG, "steps", "=", "100")),
    Command("a key as an option", "a value is set by KEY=VALUE", ("run", CONFIG, "--steps", "100")),
    Command("a misspelt option", "did you mean --fast?", ("run", CONFIG, "--fats")),
    Command("no config", "write jtrain run configs/shakespeare.yaml; configs/ has quick", ("run",)),
    Command("a config that is nearly there", "did you mean configs/quick.yaml?", ("run", "configs/quik.yaml")),
    Command("a file that is not there", "Did you mean row.npy?",
         edit=("train, valid =", 'np.load("rows.npy")\n        train, valid =')),
    Command("only parameters", "return params, ()", edit=("return params, ()", "return params")),
    Command("an attribute that is not there", "Write jax.nn.softmax.", edit=(HAND_OVER, "return jnp.softmax(x)")),
    Command("a plain mean where the last batch is padded", "Return a Mean instead", edit=(HAND_OVER, f"{HAND_OVER}[0].total")),
    Command("a build of something else", "Write `return jt.Experiment(", edit=("return jt.Experiment(", "return dict(")),
    Command("a label that is no class", "Set classes=3", ("run", CONFIG, "data.classes=2")),
    Command("the best by a metric that is none", "did you mean accuracy?", ("run", CONFIG, "checkpoint.best=lowest acuracy")),
]  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS, ids=[case.name for case in COMMANDS])
def test_a_mistake_ends_with_2_and_what_to_type(case, tmp_path, monkeypatch, compiled, capfd):
    assert case.edit[0] in CODE
    code = CODE.replace(*case.edit, 1) if case.edit[0] else CODE
    write_study(tmp_path, code, YAML.replace("adamw", "sgd"))
    at_home(tmp_path, monkeypatch, compiled)
    Path("row.npy").touch()
    assert main(case.words) == 2
    told = capfd.readouterr().err
    assert case.types in told, told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 8
    assert not Path("runs/quick/run.json").exists(), "the name is still free"
    if case.edit[0] and "return" not in case.edit[1]:
        assert 'experiments/quick.py", line' in told


def test_an_argument_of_another_library_has_its_name_here():
    for typed, argument in {"model": "params", "criterion": "loss", "val_loader": "valid"}.items():
        with pytest.raises(ConfigError, match=f"Did you mean {argument}=\\?$"):
            jt.fit(**{typed: None})  # pyright: ignore


SCRIPT = """
import numpy as np
import jtrain as jt

x = np.ones((16, 4), np.float32)


def loss(params, batch, rng):
    return jt.Mean.of((batch["image"] @ params["w"]) ** 2, batch["mask"])


for wrong in ({"batch_size": 8, "verbos": 0}, {"loss": "mse"}):
    try:
        jt.fit(**{"loss": loss, "params": {"w": x[0]}, "data": x, "steps": 1} | wrong)
    except jt.errors.UserError as error:
        print(error)
jt.fit(loss, {"w": x[0]}, x, steps=3)
print("not here")
"""


def ended(folder: Path, script: str, *options: str, **variables: str):
    path = folder / "train.py"
    path.write_text(script)
    env = plain_environ() | variables
    command = [sys.executable, "-W", "error", *options, str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


@pytest.mark.thorough
def test_a_script_ends_with_2_and_the_users_lines(tmp_path: Path):
    done = ended(tmp_path, SCRIPT.replace("jt.errors", "__import__('jtrain.errors').errors"))
    assert done.returncode == 2, done.stderr
    assert "fit has no arguments batch_size=, verbos=. Did you mean batch=, quiet=?" in done.stdout
    assert "the loss is a function of (params, batch, rng), and this is a str" in done.stdout
    assert "jt.classifier(model)" in done.stdout
    assert "not here" not in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) <= 10, done.stderr
    shown = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert shown == [str(tmp_path / "train.py")] * 2
    assert lines[-1].startswith("Write 'x', or give the array that name")


def wrong(batch):
    with user_code("the loss", batch):
        return batch["y"]


def test_a_notebook_shows_the_users_lines_and_the_message():
    with pytest.raises(UserError) as caught:
        wrong({"x": 1})
    shown = caught.value._render_traceback_()
    assert "Write 'x'" in shown[-1]
    assert "test_mistakes.py" in "".join(shown)
    assert "user_errors" not in "".join(shown)
    assert "CodeError: the loss asks for 'y', and `batch` has x" in "\n".join(shown)


def test_what_is_not_the_users_code_is_left_as_it_is():
    with pytest.raises(MemoryError), user_code("`build`"):
        raise MemoryError
    with pytest.raises(ConnectionError), user_code("`build`"):
        raise ConnectionError
    with pytest.raises(OSError, match="device") as disk, user_code("`build`"):
        raise OSError(5, "device error")
    assert not isinstance(disk.value, UserError)


def test_arguments_with_defaults_and_stars_fit():
    check_takes(lambda params, batch, rng=None: None, ("params", "batch", "rng"), "the loss")
    check_takes(lambda *args: None, ("params", "batch", "rng"), "the loss")
    check_takes(print, ("params", "batch", "rng"), "the loss")
    with pytest.raises(UserError, match=r"it takes \(params, batch, rng, scale\)"):
        check_takes(lambda params, batch, rng, scale: None, ("params", "batch", "rng"), "the loss")
    with pytest.raises(UserError, match=r"and this is a dict. Write: def init\(key\)"):
        check_takes({}, ("key",), "init")  # pyright: ignore[reportArgumentType]
