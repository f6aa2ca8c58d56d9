"""Tensors, data sets and loaders of torch, tables and other libraries' data handed to fit."""

import numpy as np
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.data import Shuffled
from jtrain.data.sources.foreign import to_array
from jtrain.errors import DataError, LossError
from jtrain.train import fit_arguments, fit_data

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
Y = np.arange(12, dtype=np.int32) % 2


@pytest.fixture(scope="module", name="torch")
def _torch():
    return pytest.importorskip("torch", reason="pip install torch")


def rows(data, size=None):
    """Return the rows of the first epoch, in the order of the data."""
    batches = fit_data.build_train_batches(data, size, seed=0)
    found = [batches[step] for step in range(12 // batches.size)]
    x = np.concatenate([batch["x"] for batch in found])
    y = np.concatenate([batch["y"] for batch in found])
    order = np.lexsort(x.T)
    return x[order], y[order]


def want():
    order = np.lexsort(X.T)
    return X[order], Y[order]


def same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_tensors_are_arrays(torch):
    same(rows((torch.tensor(X), torch.tensor(Y)), 4), want())
    same(rows({"x": torch.tensor(X, requires_grad=True), "y": torch.tensor(Y)}, 4), want())
    half = to_array(torch.tensor(X).bfloat16())
    assert half.dtype == np.float32
    assert_close(half, X, 1e-2)


def test_a_loader_gives_its_rows_and_its_batch_size(torch):
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    for shuffle in (True, False):
        loader = torch.utils.data.DataLoader(pairs, batch_size=6, shuffle=shuffle)
        batches = fit_data.build_train_batches(loader, None, seed=0)
        assert isinstance(batches, Shuffled)
        assert batches.size == 6
        same(rows(loader), want())
    assert fit_data.build_train_batches(pairs, None, seed=0).size == 32
    same(rows(pairs, 4), want())
    assert len(fit_data.build_batches(loader, 4)) == 3
    assert fit_data.build_evaluation_sets({"near": loader, "far": pairs}, 4).keys() == {
        "near",
        "far",
    }


def test_a_sampler_of_its_own_is_told(torch):
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)
    loader = torch.utils.data.DataLoader(pairs, batch_size=4, sampler=sampler)
    with pytest.raises(DataError, match=r"WeightedRandomSampler, and .*loader.dataset"):
        fit_data.build_train_batches(loader, None, seed=0)


def test_parameters_may_be_tensors_and_no_module(torch):
    found, _ = fit_arguments.build_weights({"w": torch.nn.Parameter(torch.zeros(3, 2))}, ())
    assert isinstance(found["w"], np.ndarray)
    with pytest.raises(LossError, match=r"Linear is a model of torch: .*flax.nnx"):
        fit_arguments.build_start(lambda p, b, rng: 0, torch.nn.Linear(3, 2))
    with pytest.raises(LossError, match="is a model of torch"):
        jt.classifier(torch.nn.Linear(3, 2))


class Column:
    """A column of a table; None is null."""

    def __init__(self, values):
        self.values = values
        self.null_count = sum(value is None for value in list(values))

    def to_numpy(self):
        return np.asarray(self.values)

    def to_list(self):
        return list(self.values)


def make_table(library: str, columns: dict, **methods):
    """Return a stand-in of a table of another library."""
    named = {**methods, "columns": list(columns), "__getitem__": lambda _, n: Column(columns[n])}
    return type("Frame", (), {**named, "__len__": lambda _: 12, "__module__": f"{library}.frame"})()


def test_a_table_is_its_columns():
    for library in ["pandas", "polars"]:
        table = make_table(library, {"x": X, "y": Y})
        same(rows(table, 4), want())
        if library == "polars":
            same(rows(make_table("polars", {}, collect=lambda _, table=table: table), 4), want())


def test_tables_that_are_no_arrays_are_told_what_to_write():
    for table, says in (
        (make_table("polars", {"x": [1, 2, None]}), r"'x' has no value in row 2.*drop_nulls\(\)"),
        (make_table("pandas", {1: X, "1": Y}), r"named '1', and.*data\.columns = \[f'c\{i\}'"),
        ({1: X, "1": Y}, r"named '1', and"),
        (make_table("dask", {"x": X}, compute=lambda _: 0), r"memory: data\.compute\(\)"),
        (make_table("pyspark", {"x": X}, toPandas=lambda _: 0), r"data\.toPandas\(\)"),
    ):
        with pytest.raises(DataError, match=says):
            fit_data.build_train_batches(table, 4, seed=0)


def loss(params, batch, rng):
    return jt.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


@pytest.mark.thorough
def test_big_endian_arrays_give_what_others_give():
    params = {"w": np.ones(3, ">f4")}
    apply = lambda params, batch: batch["x"] @ params["w"]
    found = jt.predict(apply, params, (X.astype(">f4"), Y), parallel="single")
    assert_close(found, X.sum(1), 1e-6)
    numbers = jt.evaluate(loss, params, (X.astype(">f8"), Y), parallel="single")
    assert_close(numbers["loss"], ((X.sum(1) - Y) ** 2).mean(), 1e-6)


@pytest.mark.thorough
def test_a_dtype_that_jax_has_not_is_refused_by_name():
    for array, advice in [
        (X.astype(object), "x.astype('float32')"),
        (X.astype(np.longdouble), "x.astype('float64')"),
        (np.arange(12).astype("M8[D]"), "(x - x.min()) / np.timedelta64(1, 'D')"),
        (np.array([*X, None], object)[:-1], "np.stack(x)"),
        (np.array(["a", "b"] * 6), "np.unique(x, return_inverse=True)[1]"),
    ]:
        with pytest.raises(DataError, match=r"`x` holds .* which no device can hold") as caught:
            jt.evaluate(loss, {"w": np.ones(3)}, {"x": array, "y": Y}, parallel="single")
        assert advice in str(caught.value)
        found = fit_data.build_batches({"x": eval(advice, {"np": np, "x": array})}, 12)[0]["x"]
        assert found.dtype.kind in "fi"
