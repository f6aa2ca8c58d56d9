"""A trained run, loaded and used from a script: `jt.load`."""

import ast
import json
import os
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close
from quick_study import CODE, at_home, state_of, trained, write_study

import jtrain as jt
from jtrain.cli import main
from jtrain.core.pytree import named_leaves
from jtrain.data.sources.row_files import encode_rows
from jtrain.errors import DataError
from jtrain.train.fit_data import describe_tree

PREDICTS = """\
            predict=predict,
            model=jt.Model(init, lambda params, extra, x: (logits(params, x), extra)),
        )
"""
LOGITS = """\
        def logits(params, x):
            return jnp.tanh(x @ params["up"] + params["bias"][None]) @ params["down"]

        def predict(params, extra, batch):
            found = logits(params, batch["x"])
            return {"label": found.argmax(1), "logits": found}

        def init(key):
"""
ROWS = np.random.default_rng(3).normal(size=(50, 2)).astype(np.float32)
RUN = ("steps=8", "evaluate.every=4", "checkpoint.every=4", "checkpoint.best=highest loss")


def predicting() -> str:
    """Return the code of a study with a `predict`."""
    code = CODE.replace("        def init(key):\n", LOGITS)
    code = code.replace('batch["x"] @', 'batch["x"].astype(params["up"].dtype) @')
    code = code.replace("jnp.tanh(x @", "jnp.tanh(x.astype(params['up'].dtype) @")
    head, _, tail = code.rpartition("        )\n")
    return f"{head}{PREDICTS}{tail}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def params(place: Path) -> dict[str, np.ndarray]:
    """Train a run and return it with its parameters."""
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        outcome = trained(write_study(place, predicting()), *RUN)
        half = ("steps=1", "evaluate.every=0", "name=half", "precision.kind=bf16")
        trained("configs/quick.yaml", *half)
        return jax.device_get(state_of(outcome.directory, 8).params)


@pytest.fixture(autouse=True)
def _home(place: Path, params, monkeypatch: pytest.MonkeyPatch):
    at_home(place, monkeypatch, place / "compiled")


def by_hand(params, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ params["up"] + params["bias"]) @ params["down"]


@pytest.mark.thorough
def test_gives_parameters_model_and_predictions(params):
    run = jt.load("quick")
    assert (run.directory, run.step, run.config.steps) == (Path("runs/quick"), 8, 8)
    assert jt.load("quick", np.int64(4)).step == jt.load("quick", "best").step == 4
    assert jax.tree.all(jax.tree.map(np.array_equal, params, jax.device_get(run.params)))
    assert repr(run) == "LoadedRun(runs/quick at step 8: quick, 48 parameters in 3 leaves)"
    assert dict(run.inputs) == {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    logits = by_hand(params, ROWS)
    for data in (ROWS, {"x": ROWS, "label": np.zeros(50)}, {"x": ROWS.astype(np.float64)}):
        found = run.predict(data)
        assert_close(found["logits"], logits, 1e-5)
        np.testing.assert_array_equal(found["label"], logits.argmax(1))
    with pytest.raises(DataError, match=r"takes x of shape \[n, 2\], and it is \[50, 1\]"):
        run.predict(ROWS[:, :1])  # it would be broadcast
    assert run.model is not None
    assert_close(run.model.apply(run.params, (), ROWS)[0], logits, 1e-5)
    own = run.predict(ROWS, lambda p, batch: batch["x"] @ p["up"])
    assert_close(own, ROWS @ params["up"], 1e-5)


@pytest.mark.thorough
def test_predictions_are_computed_in_the_precision_of_the_run():
    run = jt.load("half")
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), run.params)
    found = run.predict(ROWS)["logits"]
    assert found.dtype == np.float32
    expected = run.model.apply(narrow, (), ROWS)[0].astype(jnp.float32)
    assert_close(found, expected, 1e-2)
    assert np.abs(found - by_hand(jax.device_get(run.params), ROWS)).max() > 1e-5


# Runs that jt.fit made.


TREES = {
    "slashes": {"mlp/~/linear_0": {"w": 1, "b": 2}, "mlp/~/linear_1": {"w": 3}},  # of haiku
    "whole numbers": {"blocks": {0: 1, 1: {10: 2, 9: 3}}, "1": 4},
    "tuples": [(1, 2), (3, [4, {"a": ()}])],
    "in an order": OrderedDict(b=1, a=2),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_is_the_same_after_json(tree):
    names = {name: leaf for name, leaf in named_leaves({"params": tree}).items()}
    literal = json.loads(json.dumps(describe_tree({"params": tree})))
    found = jax.tree.map(names.__getitem__, ast.literal_eval(literal))["params"]
    assert found == tree
    plain = dict(tree) if isinstance(tree, OrderedDict) else tree
    assert jax.tree.structure(found) == jax.tree.structure(plain)


# The verb.


def read_back(out: Path) -> dict[str, np.ndarray]:
    if out.suffix == ".npz":
        return dict(np.load(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {name: np.array([row[name] for row in rows], np.float32) for name in rows[0]}


@pytest.mark.thorough
@pytest.mark.parametrize("out", ["out/y.npz", "y.jsonl"])
def test_the_verb_writes_a_prediction_for_each_row(out: str, params, capfd):
    Path("rows.npz").write_bytes(encode_rows(Path("rows.npz"), {"x": ROWS}))
    assert main(["predict", "quick", "--data", "rows.npz", "--out", out, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    outputs = {"label": "int32[50]", "logits": "float32[50, 3]"}
    assert said == {"run": "quick", "step": 8, "rows": 50, "out": out, "outputs": outputs}
    found = read_back(Path(out))
    np.testing.assert_array_equal(found["logits"], jt.load("quick").predict(ROWS)["logits"])
    np.testing.assert_array_equal(found["label"], by_hand(params, ROWS).argmax(1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "rows.npz"), "--out rows.npz is the file of --data"),
        (("--data", "pickled.npz"), "it holds Python objects, which may run code"),
    ],
)
def test_the_verb_reports_errors(words: tuple[str, str], says: str, capfd):
    Path("rows.npz").write_bytes(encode_rows(Path("rows.npz"), {"x": ROWS}))
    np.savez("pickled.npz", x=np.array([{}], object))
    typed = {"--data": "rows.npz", "--out": "y.npz"} | {words[0]: words[1]}
    assert main(["predict", "quick", *(w for pair in typed.items() for w in pair)]) == 2
    told = capfd.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert os.path.exists("rows.npz")
