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


def test_a_table_is_its_columns():
    class Column:
        def __init__(self, values):
            self.values = values

        def to_numpy(self):
            return self.values

    class DataFrame:
        columns = ("x", "y")

        def __getitem__(self, name):
            return Column({"x": X, "y": Y}[name])

    DataFrame.__module__ = "pandas.core.frame"
    same(rows(DataFrame(), 4), want())


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
