"""The mistakes of a first day in a script: its own line, one sentence, one thing to type.

Each is scored as by who has just made it: 3 says what to type, 2 names the mistake and its place, 1
is an error of another library, 0 is nothing.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jtrain as jt
from jtrain.errors import UserError
from jtrain.models.adapters.nnx import from_nnx
from jtrain.models.transformer import Transformer

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
W = {"w": np.zeros((4, 2), np.float32)}
FLOAT = X[:, 0]
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


def an_array_for_a_size():
    fit(lambda p, b, rng: jt.Mean.of(jnp.zeros(b["y"].sum()), b["mask"]))


def a_wrong_batch_key():
    fit(lambda p, b, rng: jt.Mean.of(ce(b["image"] @ p["w"], b["y"]), b["mask"]))


def a_misspelt_batch_key():
    fit(
        lambda p, batch, rng: jt.Mean.of(ce(batch["imag"] @ p["w"], batch["y"]), batch["mask"]),
        data={"image": X, "y": Y},
    )


def a_wrong_parameter_key():
    def loss(params, batch, rng):
        logits = batch["x"] @ params["dense"]["kernel"]
        return jt.Mean.of(ce(logits, batch["y"]), batch["mask"])

    fit(loss, {"dense": {"w": W["w"]}})


def float_labels():
    fit(data=(X, Y.astype(np.float32)))


def transposed_logits():
    fit(lambda p, b, rng: jt.Mean.of(ce((b["x"] @ p["w"]).T, b["y"]), b["mask"]))


def a_transposed_kernel():
    fit(lambda p, b, rng: jt.Mean.of(ce(b["x"] @ p["w"].T, b["y"]), b["mask"]))


def a_loss_of_two_arguments():
    fit(lambda params, batch: good(params, batch, None))


def a_loss_that_gives_a_number_a_row():
    fit(lambda p, b, rng: ce(b["x"] @ p["w"], b["y"]))


def integer_parameters():
    fit(params={"w": np.zeros((4, 2), int)})


def a_generator_of_parameters():
    fit(params=(x for x in [W["w"]]))


def names_of_a_list():
    fit(params=[W["w"]])


def init_without_a_key():
    fit(params=lambda: (W, ()))


def init_that_returns_only_parameters():
    fit(params=lambda key: W)


def init_that_returns_a_list():
    fit(params=lambda key: ({"w": [[0.0, 0.0]] * 3 + ["a"]}, ()))


def a_value_kept_from_a_trace():
    kept = []

    def loss(params, batch, rng):
        kept.append(batch["x"])
        return good(params, {**batch, "x": kept[0]}, rng)

    with pytest.warns(UserWarning, match="the loss stored a value of its trace in `kept`"):
        fit(loss)


def a_batch_norm_without_extra():
    model = from_nnx(Net)
    params, _ = model.init(jax.random.key(0))

    def loss(params, batch, rng):
        logits, _ = model.apply(params, {}, batch["x"], train=rng is not None)
        return jt.Mean.of(ce(logits, batch["y"]), batch["mask"])

    fit(loss, params)


def a_dict_for_the_loss_of_a_module():
    fit(params=Net(nnx.Rngs(0)))


def a_class_for_a_model():
    fit(jt.classifier(Net(nnx.Rngs(0))), Net)


def a_draw_in_an_evaluation():
    def loss(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        return good(params, {**batch, "x": batch["x"] * keep}, rng)

    fit(loss, valid=(X, Y))


def a_name_that_is_not_there():
    fit(lambda params, batch, rng: good(params, batch, rgn))


def a_function_of_another_module():
    fit(lambda p, b, rng: jt.Mean.of(jnp.softmax(b["x"] @ p["w"])[:, 0], b["mask"]))


def epochs_and_steps():
    fit(steps=10, epochs=2)


def neither_epochs_nor_steps():
    jt.fit(good, W, (X, Y))


def logits_for_a_language_model_of_the_last_token():
    tokens = np.zeros((16, 5), np.int32)
    fit(jt.language_model(lambda p, t: p["w"][t[:, -1]]), data={"tokens": tokens})


def labels_of_text():
    fit(data=(X, np.array(["cat", "dog"] * 8)))


def a_generator_for_data():
    fit(data=(row for row in X))


def text_for_data():
    fit(jt.language_model(lambda p, t: p["w"][t]), data="To be, or not to be")


def values_of_a_model():
    fit(jt.language_model(Transformer(vocab=4, context=4, layers=1, heads=1, width=4)))


def three_arrays_for_data():
    fit(data=(X, Y, Y))


def a_share_of_nothing_for_validation():
    fit(valid=20.0)


def a_model_in_the_place_of_the_loss():
    fit(Net(nnx.Rngs(0)), X, Y)


def rows_of_two_lengths():
    fit(data=(X, Y[:9]))


def a_row_that_is_not_finite():
    x = X.copy()
    x[3, 2] = np.nan
    fit(data=(x, Y), steps=100)


def labels_under_another_name():
    fit(jt.classifier(lambda p, x: x @ p["w"]), data={"x": X, "label": Y})


def float_labels_of_a_classifier():
    fit(jt.classifier(lambda p, x: x @ p["w"]), data=(X, FLOAT))


def one_logit_for_a_classifier():
    fit(jt.classifier(lambda p, x: x @ p["w"][:, :1]), data=(X, Y))


def outputs_of_another_shape():
    fit(jt.regression(lambda p, x: x @ p["w"]), data=(X, FLOAT))


def a_prediction_without_a_model():
    fit().predict(X)


def a_module_that_was_not_given():
    fit().model.train()


def predictions_summed_over_rows():
    jt.predict(lambda p, b: (b["x"] @ p["w"]).sum(), W, X, batch=8, parallel="single")


class Case(NamedTuple):
    make: Callable[[], None]
    says: str
    """The sentence."""
    types: str
    """What is to be typed; empty scores 2."""
    line: str = ""
    """The line of the user's that is shown; empty where it is the call alone."""


CASES = [
    Case(float_of_a_loss, "takes a value that JAX has not computed yet for a Python number",
         'jax.debug.print("{}", x)', "print(float(total.total))"),
    Case(an_if_on_an_array, "asks whether a value holds that JAX has not computed yet",
         "jnp.where(condition, a, b)", "if values.mean() > 1:"),
    Case(numpy_in_the_loss, "gives numpy a value that JAX has not computed yet",
         "jnp.asarray(...) in the place of np.asarray(...)", 'np.asarray(b["x"])'),
    Case(a_mask_as_an_index, "picks values by a mask, so that their number depends on the mask",
         "jnp.where(mask, x, 0)", 'batch["x"][batch["mask"]]'),
    Case(an_array_for_a_size, "takes a value that JAX has not computed yet for a size",
         "x.shape[0]", 'jnp.zeros(b["y"].sum())'),
    Case(a_wrong_batch_key, "asks for 'image', and `b` has x (float32[8,4]), y (int32[8])",
         "Write 'x', or give the array that name: {'image': ...}", 'b["image"]'),
    Case(a_misspelt_batch_key, "asks for 'imag', and `batch` has image (float32[8,4])",
         "Write 'image'.", 'batch["imag"]'),
    Case(a_wrong_parameter_key, "asks for 'kernel', and `params['dense']` has w (float32[4,2])",
         "Write 'w'", 'params["dense"]["kernel"]'),
    Case(float_labels, "numbers with a fraction where whole numbers count classes",
         "y.astype(np.int32)", 'ce(batch["x"] @ params["w"], batch["y"])'),
    Case(transposed_logits, "brings together arrays whose shapes do not fit",
         "The rows, 8 here, are the first dim of every array, and one begins with 2: turn it",
         'ce((b["x"] @ p["w"]).T, b["y"])'),
    Case(a_transposed_kernel, "shapes do not fit (the batch has x (float32[8,4]), y (int32[8])",
         "print(x.shape)", 'b["x"] @ p["w"].T'),
    Case(a_loss_of_two_arguments, "is called as loss(params, batch, rng), and it takes (params, b",
         "def loss(params, batch, rng):", "in <lambda>"),
    Case(a_loss_that_gives_a_number_a_row, "returned an array of shape (8,), not one number",
         'jt.Mean.of(values, batch["mask"])'),
    Case(integer_parameters, "The parameter w holds int64 values", "give it as float32"),
    Case(a_generator_of_parameters, "The parameters are a generator, which gives its arrays once",
         "Make a dict of arrays"),
    Case(names_of_a_list, "asks a list for a name", "Count, params[0]; or give a dict",
         'params["w"]'),
    Case(init_without_a_key, "init is called as init(key), and it takes ()", "def init(key):"),
    Case(init_that_returns_only_parameters, "init returns (params, extra), and this one returned a "
         "dict", "return params, ()"),
    Case(init_that_returns_a_list, "The parameter w/3 is a str, and parameters are arrays",
         "jnp.asarray"),
    Case(a_value_kept_from_a_trace, "uses a value that it stored in `kept`",
         'return loss, {"name": jt.Mean.of(values, batch["mask"])}'),
    Case(a_batch_norm_without_extra, "the module carries norm/mean beside its parameters",
         "jt.classifier(model)", "model.apply(params, {}, batch"),
    Case(a_dict_for_the_loss_of_a_module, "takes an object for a dict",
         'def loss(module, batch, rng): outputs = module(batch["x"])', 'params["w"]'),
    Case(a_class_for_a_model, "Net is a class, and jtrain takes a model",
         "Net(rngs=nnx.Rngs(0))"),
    Case(a_draw_in_an_evaluation, "draws without a key: `rng` is None in an evaluation",
         "x if rng is None else", "jax.random.bernoulli(rng"),
    Case(a_name_that_is_not_there, "NameError: name 'rgn' is not defined", "Did you mean rng?",
         "good(params, batch, rgn)"),
    Case(a_function_of_another_module, "has no attribute 'softmax'", "Write jax.nn.softmax.",
         "jnp.softmax"),
    Case(epochs_and_steps, "both were given", "Write epochs=5, or steps=1000"),
    Case(neither_epochs_nor_steps, "neither was given", "Write epochs=5, or steps=1000"),
    Case(logits_for_a_language_model_of_the_last_token, "gives logits of [8, 4] x the vocabulary",
         "Return the logits of every position"),
    Case(labels_of_text, "`y` holds <U3 values, which no device can hold", "np.unique(y, return"),
    Case(a_generator_for_data, "and this is a generator", "jtrain.data.LoaderBatches(lambda:"),
    Case(text_for_data, "and this is a str", "jtrain data prepare FILE --out FOLDER"),
    Case(values_of_a_model, "this is a Transformer, values of a model", "write .build() behind"),
    Case(three_arrays_for_data, "and this is a tuple", "dict(x=..., y=..., weight=...)"),
    Case(a_share_of_nothing_for_validation, "valid=20 of 16 rows would hold out",
         "valid=0.2, or give the rows: valid=(x, y)"),
    Case(a_model_in_the_place_of_the_loss, "the first argument is a model",
         "jt.fit(jt.classifier(model), model, (x, y))"),
    Case(rows_of_two_lengths, "need one length, and these differ: x 16, y 9", "Cut them to 9 rows"),
    Case(a_row_that_is_not_finite, "steps were skipped because the data is not finite: row 3 of "
         "`x` has nan at [2]", "x = np.nan_to_num(x)"),
    Case(labels_under_another_name, "the loss reads 'y' in a batch, which has label, x",
         "jt.classifier(model, labels='label')"),
    Case(float_labels_of_a_classifier, "whole numbers that count classes from 0, and 'y' holds",
         "y.astype(np.int32)"),
    Case(one_logit_for_a_classifier, "gives logits of shape [8, 'classes'] for labels of shape [8]",
         "jt.binary_classifier"),
    Case(outputs_of_another_shape, "the model gave outputs of shape [8, 2], and 'y' has shape [8]",
         "Give the last layer as many outputs as 'y' has numbers a row: 1"),
    Case(a_prediction_without_a_model, "from which the model's output is not known",
         "jt.predict(apply, result.params, data)"),
    Case(a_module_that_was_not_given, "there is no model: fit was given arrays",
         "Use result.params"),
    Case(predictions_summed_over_rows, "for 8 rows has shape []", "no sums over it"),
]  # fmt: skip


def score(case: Case, told: str) -> int:
    """3: what to type is said; 2: what happened is; 0: neither."""
    if case.says not in told:
        return 0
    return 3 if case.types in told else 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=[case.make.__name__ for case in CASES])
def test_a_mistake_is_told_by_its_line_a_sentence_and_what_to_type(case: Case):
    with pytest.raises(UserError) as caught:
        case.make()
    told = str(caught.value)
    assert score(case, told) == 3, told
    assert case.line in told
    assert caught.value.code == 2
    shown = traceback.extract_tb(caught.value.__traceback__)
    assert sum("/jtrain/" in frame.filename for frame in shown) <= 3, "no inside of jtrain"
    assert not any("/jax/" in frame.filename for frame in shown)
    if case.line:
        assert f'{HERE}", line' in told
    assert len(told.splitlines()) <= 12
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert "JAX has removed its internal frames" not in notes


def test_forty_mistakes_are_kept():
    assert len(CASES) >= 40
    assert len({case.make for case in CASES}) == len(CASES)


def test_the_error_that_it_was_stays_within_reach():
    with pytest.raises(UserError) as caught:
        a_wrong_batch_key()
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__suppress_context__, "and is not printed"


def test_whole_tracebacks_are_there_for_who_asks(monkeypatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    with pytest.raises(UserError) as caught:
        a_wrong_batch_key()
    assert isinstance(caught.value.__cause__, KeyError)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum("/jtrain/" in name for name in files) > 3, "the inside of jtrain"
