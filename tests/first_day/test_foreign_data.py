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


def test_a_data_set_of_ones_own_may_name_its_arrays(torch):
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return {"x": torch.tensor(X[index]), "y": int(Y[index])}

    same(rows(Own(), 4), want())

    class Three(Own):
        def __getitem__(self, index):
            return X[index], Y[index], 1

    with pytest.raises(DataError, match=r"and this one has 3 items. Return a dict"):
        fit_data.build_train_batches(Three(), 4, seed=0)[0]


def test_a_loader_that_streams_has_batches_of_one_size(torch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((X[i], Y[i]) for i in range(12))

    loader = torch.utils.data.DataLoader(Stream(), batch_size=4, drop_last=True)
    same(rows(loader), want())
    with pytest.raises(DataError, match=r"batch_size=32, drop_last=True"):
        fit_data.build_train_batches(
            torch.utils.data.DataLoader(Stream(), batch_size=5), None, seed=0
        )


def test_a_sampler_of_its_own_is_told(torch):
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)
    loader = torch.utils.data.DataLoader(pairs, batch_size=4, sampler=sampler)
    with pytest.raises(DataError, match=r"WeightedRandomSampler, and .*loader.dataset"):
        fit_data.build_train_batches(loader, None, seed=0)


def test_a_sampler_of_batches_is_told_unless_it_is_plain(torch):
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    load, of = torch.utils.data.DataLoader, torch.utils.data.BatchSampler
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12)
    with pytest.raises(DataError, match=r"WeightedRandomSampler, and .*loader.dataset"):
        fit_data.build_train_batches(
            load(pairs, batch_sampler=of(weighted, 4, False)), None, seed=0
        )
    with pytest.raises(DataError, match="a list, and jtrain draws rows itself"):
        fit_data.build_train_batches(load(pairs, batch_sampler=[[0, 1], [2, 3]]), None, seed=0)
    plain = load(pairs, batch_sampler=of(torch.utils.data.RandomSampler(pairs), 6, False))
    assert fit_data.build_train_batches(plain, None, seed=0).size == 6


def test_parameters_may_be_tensors_and_no_module(torch):
    found, _ = fit_arguments.build_weights({"w": torch.nn.Parameter(torch.zeros(3, 2))}, ())
    assert isinstance(found["w"], np.ndarray)
    with pytest.raises(LossError, match=r"Linear is a model of torch: .*flax.nnx"):
        fit_arguments.build_start(lambda p, b, rng: 0, torch.nn.Linear(3, 2))
    with pytest.raises(LossError, match="is a model of torch"):
        jt.classifier(torch.nn.Linear(3, 2))


def test_torch_in_the_loss_is_told(torch):
    def loss(params, batch, rng):
        return torch.nn.functional.cross_entropy(batch["x"] @ params["w"], batch["y"])

    with pytest.raises(jt.errors.UserError, match=r"gives torch an array of JAX[\s\S]*optax"):
        jt.fit(
            loss, {"w": np.zeros((3, 2), np.float32)}, (X, Y), steps=1, batch=4, parallel="single"
        )


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


@pytest.mark.parametrize("library", ["pandas", "polars", "modin", "pyarrow"])
def test_a_table_is_its_columns(library: str):
    table = make_table(library, {"x": X, "y": Y})
    same(rows(table, 4), want())
    if library == "polars":
        same(rows(make_table("polars", {}, collect=lambda _: table), 4), want())


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


@pytest.mark.slow
def test_tables_of_the_libraries_are_read():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    arrow = pytest.importorskip("pyarrow")
    columns = {"x": [0.5, 1.5], "y": [1, 2]}
    frame = pandas.DataFrame(columns)
    for data in (
        frame,
        polars.DataFrame(columns),
        polars.LazyFrame(columns),
        arrow.table(columns),
        {"x": arrow.table(columns)["x"], "y": frame["y"]},
        frame.to_records(index=False),
    ):
        batch = fit_data.build_batches(data, 2)[0]
        assert {name: batch[name].tolist() for name in columns} == columns
    data = pandas.DataFrame(np.ones((2, 3)), columns=[1, "1", "y"])
    with pytest.raises(DataError, match=r"data\.columns = ") as caught:
        fit_data.build_batches(data, 2)
    exec(str(caught.value).partition("own: ")[2])
    assert set(fit_data.build_batches(data, 2)[0]) == {"c0", "c1", "c2", "row", "mask"}
    dummies = pandas.get_dummies(pandas.DataFrame({"c": ["a", "b"], "z": [1.0, 2.0]}))
    with pytest.raises(DataError, match=r"are numbers: give x\.astype\('float32'\)"):
        fit_data.build_batches((dummies, [0, 1]), 2)
    assert fit_data.build_batches((dummies.astype("float32"), [0, 1]), 2)[0]["x"].shape == (2, 3)


class OwnBatches:
    """Batches of a user's own."""

    size, ragged = 12, False

    def __init__(self, source):
        self.source = source

    def __len__(self) -> int:
        return 1

    def __getitem__(self, step: int) -> dict:
        places = {"row": np.arange(12, dtype=np.int32), "mask": np.ones(12, bool)}
        return self.source[np.arange(12)] | places

    def shard(self, index: int, count: int) -> "OwnBatches":
        return self


class OwnRows:
    """A source of a user's own."""

    def __init__(self, x):
        self.x = x

    def __len__(self) -> int:
        return 12

    def __getitem__(self, indices) -> dict:
        return {"x": self.x[indices], "y": Y[indices]}


def loss(params, batch, rng):
    return jt.Mean.of((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


MAKERS = [lambda x: (x, Y), OwnRows, lambda x: OwnBatches(OwnRows(x))]


@pytest.mark.parametrize("make", MAKERS)
def test_big_endian_arrays_give_what_others_give(make):
    params = {"w": np.ones(3, ">f4")}
    apply = lambda params, batch: batch["x"] @ params["w"]
    found = jt.predict(apply, params, make(X.astype(">f4")), parallel="single")
    assert_close(found, X.sum(1), 1e-6)
    numbers = jt.evaluate(loss, params, make(X.astype(">f8")), parallel="single")
    assert_close(numbers["loss"], ((X.sum(1) - Y) ** 2).mean(), 1e-6)


def test_a_parameter_of_long_double_is_refused_by_name():
    apply = lambda params, batch: batch["x"] @ params["w"]
    with pytest.raises(DataError, match=r"`w` holds .*w\.astype\('float64'\)"):
        jt.predict(apply, {"w": np.ones(3, np.longdouble)}, X, parallel="single")


@pytest.mark.thorough
@pytest.mark.parametrize("make", MAKERS)
def test_big_endian_arrays_are_trained_on(make):
    how = {"steps": 2, "batch": 12, "quiet": True, "parallel": "single"}
    fit = lambda order: jt.fit(
        loss, {"w": np.ones(3, f"{order}f4")}, make(X.astype(f"{order}f4")), **how
    )
    np.testing.assert_array_equal(fit(">").params["w"], fit("<").params["w"])


@pytest.mark.parametrize(
    ("array", "advice"),
    [
        (X.astype(object), "x.astype('float32')"),
        (X.astype(str), "x.astype('float32')"),
        (X.astype(np.longdouble), "x.astype('float64')"),
        (np.array([("a", 1)] * 12, [("name", "U1"), ("x", "f4")])[["x"]], "x['x']"),
        (np.arange(12).astype("M8[D]"), "(x - x.min()) / np.timedelta64(1, 'D')"),
        (np.arange(12).astype("m8[h]"), "x / np.timedelta64(1, 'D')"),
        (np.array([*X, None], object)[:-1], "np.stack(x)"),
        (np.array(["a", "b"] * 6), "np.unique(x, return_inverse=True)[1]"),
    ],
)
def test_a_dtype_that_jax_has_not_is_refused_by_name(array, advice: str):
    for data in ({"x": array, "y": Y}, OwnRows(array), OwnBatches(OwnRows(array))):
        with pytest.raises(DataError, match=r"`x` holds .* which no device can hold") as caught:
            jt.evaluate(loss, {"w": np.ones(3)}, data, parallel="single")
        assert advice in str(caught.value)
    found = fit_data.build_batches({"x": eval(advice, {"np": np, "x": array})}, 12)[0]["x"]
    assert found.dtype.kind in "fi"


def test_a_row_without_a_value_is_named():
    with pytest.raises(DataError, match=r"`x` holds object .*Row 7 has no value.*frame\.dropna"):
        fit_data.build_batches({"x": np.array([1.0] * 7 + [None, 2.0])}, 2)


def test_models_of_other_libraries_are_told_how():
    equinox = pytest.importorskip("equinox")
    import flax.linen as nn
    import jax

    net = equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    for model, how in ((net, "from_equinox"), (nn.Dense(2), "from_linen")):
        with pytest.raises(LossError, match=how):
            jt.classifier(model)
        with pytest.raises(LossError, match=how):
            fit_arguments.build_start(lambda p, b, rng: 0, model)
    with pytest.raises(LossError, match="and this is a str"):
        jt.classifier("resnet")
