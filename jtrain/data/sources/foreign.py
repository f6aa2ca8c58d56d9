"""Rows of other libraries: tables, torch, Grain, and Hugging Face (`jtrain[hf]`)."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.data.batches.stream import LoaderBatches
from jtrain.data.sources.source import import_optional
from jtrain.errors import DataError
from jtrain.io.redact import redact

FRAMES = {"pandas", "polars", "modin", "geopandas", "pyarrow"}
LAZY = ("to_pandas", "toPandas", "compute", "df")  # methods of other tables that give a frame


def to_array(x: Any) -> Any:
    """Return a tensor of torch or TensorFlow or a column of Arrow as a numpy array; else `x`.

    A torch tensor is detached and moved to the CPU; bfloat16, which numpy lacks, becomes float32.
    A LazyFrame of polars is collected.
    """
    if library_name(x) == "torch" and hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if "bfloat16" in str(x.dtype) else x).numpy()
    if library_name(x) == "tensorflow" and hasattr(x, "numpy"):
        return x.numpy()
    if library_name(x) == "pyarrow" and not hasattr(x, "columns"):
        return x.to_numpy(zero_copy_only=False)
    return x.collect() if library_name(x) == "polars" and hasattr(x, "collect") else x


def get_columns(table: Any) -> dict[str, Any] | None:
    """Return the columns of a table or of a structured array by name; None for anything else.

    Raises:
        DataError: two columns of one name, a row without a value (of polars or Arrow), or a table
            that is not in memory.
    """
    if fields := getattr(getattr(table, "dtype", None), "names", None):
        return {name: table[name] for name in fields}
    if isinstance(table, np.ndarray) or not hasattr(table, "columns"):
        return None
    if library_name(table) not in FRAMES:
        if how := next((name for name in LAZY if hasattr(table, name)), None):
            raise DataError(
                f"A {type(table).__name__} is a table that cannot be read by rows. Give it in "
                f"memory: data.{how}()."
            )
        return None
    names = getattr(table, "column_names", table.columns)
    new = f"[f'c{{i}}' for i in range({len(names)})]"
    arrow = library_name(table) == "pyarrow"
    check_names(names, f"data.rename_columns({new})" if arrow else f"data.columns = {new}")
    columns = {str(name): table[name] for name in names}
    for name, column in columns.items():
        nulls = getattr(column, "null_count", 0)
        if nulls() if callable(nulls) else nulls:
            values = column.to_pylist() if hasattr(column, "to_pylist") else column.to_list()
            raise DataError(
                f"Column {name!r} has no value in row {values.index(None)}. Leave such rows out, "
                f"data.{'drop_null' if arrow else 'drop_nulls'}(), or fill them."
            )
    return {name: column.to_numpy() for name, column in columns.items()}


def check_names(names: Any, advice: str) -> None:
    """Raise DataError if two columns would be one array."""
    if twice := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise DataError(
            f"Two columns are named {twice[0]!r}, and would be one array. Give each a name of its "
            f"own: {advice}"
        )


def library_name(x: Any) -> str:
    """Return the name of the library that the class of `x` comes from."""
    return type(x).__module__.partition(".")[0]


def is_array(x: Any) -> bool:
    """Return whether `x` is an array of any library."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


ENDLESS = 1 << 62  # Grain gives an endless data set a length of sys.maxsize


class GrainRows:
    """Rows of a `grain.MapDataset` whose elements are dicts of arrays or, with `names`, tuples.

    Use this class for records that cost work, such as images to decode. Grain reads element by
    element (15 us each, benchmarks/input_pipeline.py); data in memory is better read by `Arrays`.
    The data set must not shuffle, repeat or batch: `Shuffled` does.

    Raises:
        DataError: a data set that can only be streamed, or elements of another kind.
    """

    def __init__(self, dataset: Any, *, names: Sequence[str] = ()):
        import grain  # imports JAX

        if not isinstance(dataset, grain.MapDataset):
            raise DataError(
                f"GrainRows reads rows by index, and a {type(dataset).__name__} can only be "
                f"streamed. Give the MapDataset before its .to_iter_dataset()."
            )
        if len(dataset) >= ENDLESS:
            raise DataError(
                "The MapDataset repeats without end. Remove its .repeat(): Shuffled repeats the "
                "rows by itself."
            )
        self.dataset, self.names = dataset, tuple(names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        rows = [self._row(index) for index in indices.tolist()]
        if all(row.keys() == rows[0].keys() for row in rows):
            with contextlib.suppress(ValueError):
                return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        first = {name: np.shape(value) for name, value in rows[0].items()}
        index, odd = next(
            (i, shapes)
            for i, row in zip(indices.tolist(), rows, strict=True)
            if (shapes := {name: np.shape(value) for name, value in row.items()}) != first
        )
        raise DataError(
            f"Elements of a batch need one shape, and element {index} has {odd} where element "
            f"{indices[0]} has {first}. Make them alike: dataset.map(crop_or_pad)."
        )

    def _row(self, index: int) -> dict[str, Any]:
        element = self.dataset[index]
        if isinstance(element, dict):
            return element
        if isinstance(element, tuple):
            if len(element) == len(self.names):
                return dict(zip(self.names, element, strict=True))
            given = ", ".join(f'"{name}"' for name in ("image", "label")[: len(element)])
            raise DataError(
                f"Element {index} is a tuple of {len(element)} and names has {len(self.names)}: "
                f"{self.names}. Name each part: GrainRows(dataset, names=[{given}])."
            )
        raise DataError(
            f"Element {index} is a {type(element).__name__}, not a dict of arrays. "
            f"Give dicts: dataset.map(lambda x: {{'image': x}}); a filter makes elements None."
        )


class TorchRows:
    """The rows of a map-style `torch.utils.data.Dataset`, collated by a `collate_fn`.

    A row is a mapping of arrays, a pair (called x and y) or a single array (x).

    Args:
        dataset: a data set with `len` and an item for each index.
        collate: turns a list of items into a batch, like a DataLoader's `collate_fn`.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]):
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        return named_arrays(self._collate([self.dataset[i] for i in indices.tolist()]))


def from_loader(loader: Any) -> TorchRows | LoaderBatches:
    """Return the rows that a DataLoader reads, or its batches if it can only be streamed.

    In place of the DataLoader jtrain shuffles, as a function of seed and step, so that a stopped
    run resumes exactly.

    Raises:
        DataError: if the DataLoader has a custom sampler, or streams batches of different sizes.
    """
    if hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__"):
        _check_sampler(loader)
        return TorchRows(loader.dataset, loader.collate_fn)
    if not (loader.batch_size and loader.drop_last):
        raise DataError(
            "this DataLoader streams, and its last batch may be short. Make every batch one size: "
            "DataLoader(dataset, batch_size=32, drop_last=True)."
        )
    return LoaderBatches(lambda: map(named_arrays, loader), size=loader.batch_size)


def named_arrays(batch: Any) -> dict[str, np.ndarray]:
    """Return a batch of tensors as arrays by name: its own names, `x` and `y`, or `x`.

    Raises:
        DataError: if the batch is not a mapping, pair or tensor.
    """
    if hasattr(batch, "shape"):
        batch = {"x": batch}
    elif isinstance(batch, list | tuple) and len(batch) in (1, 2):
        batch = dict(zip("xy", batch, strict=False))
    if isinstance(batch, Mapping):
        return {str(name): np.asarray(to_array(array)) for name, array in batch.items()}
    found = f"{len(batch)} items" if isinstance(batch, list | tuple) else type(batch).__name__
    raise DataError(
        f"an item of a torch data set is (x, y), one tensor, or a dict of tensors by name, and "
        f'this one has {found}. Return a dict from its __getitem__: {{"x": ..., "y": ...}}.'
    )


def _check_sampler(loader: Any) -> None:
    # A plain BatchSampler has the sampler of the rows; any other draws them itself.
    by_batch = loader.batch_sampler
    is_plain = type(by_batch).__name__ in {"BatchSampler", "NoneType"}
    sampler = type(getattr(by_batch, "sampler", loader.sampler) if is_plain else by_batch).__name__
    if sampler not in {"RandomSampler", "SequentialSampler"}:
        raise DataError(
            f"this DataLoader draws its rows by a {sampler}, and jtrain draws rows itself, each "
            "once an epoch. Give the data set alone, jt.fit(loss, params, loader.dataset), with a "
            "weight a row in the loss where rows count differently."
        )


def load_hub_set(name: str, config: str = "", split: str = "train", revision: str = "") -> Any:
    """Return a split of a data set of the Hugging Face Hub as a `datasets.Dataset`.

    It is downloaded once, into the cache of `datasets`. HuggingFace gives its rows of numbers.

    Args:
        name: `org/set`, or a folder with files.
        config: configuration of the data set; empty: its default one.
        revision: branch, tag or commit; empty: the main branch.

    Raises:
        DataError: if there is none, it may not be read, or it is a pickle.
    """
    package = import_optional("datasets", "hf", "A data set of the Hugging Face Hub")
    try:
        builder = package.load_dataset_builder(name, config or None, revision=revision or None)
        if ".pandas." not in type(builder).__module__:
            builder.download_and_prepare()
            return builder.as_dataset(split)
        words = "it is a pickle, and reading one runs the program in it"
    except Exception as error:  # of the Hub, of the network, or of the files
        words = f"{type(error).__name__}: {redact(str(error).strip())[:300]}"
    raise DataError(
        f"The split {split!r} of the data set {name} cannot be read ({words}). Correct name, "
        f"config, split or revision; for a private or gated set give a token (set HF_TOKEN, or: "
        f"hf auth login); without a network, download the set first where there is one."
    )


TENSORS = {"numpy", "torch", "tensorflow", "jax"}  # formats whose dtype is used


class HuggingFace:
    """The rows of a `datasets.Dataset`: numbers, lists of one length and images of one size.

    A batch is read from the Arrow tables in one call, in the format of the data set: its columns,
    its dtype, or its transform (`with_transform`), which must return the same rows whenever it is
    called. The data set must not be shuffled or repeated: `Shuffled` does.

    Args:
        dataset: the result of `load_dataset(..., split="train")` or `load_from_disk`.
        columns: the columns to read; empty: those of the format, or of the transform's result.

    Raises:
        DataError: a dict of splits, a data set that can only be streamed, a column that does not
            exist or holds no numbers, None in a row, rows of different shapes, a transform that
            drops rows; or `datasets` is not installed.
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] = ()):
        package = import_optional("datasets", "hf", "A Hugging Face data set")
        if isinstance(dataset, dict):  # a DatasetDict is one
            raise DataError(
                f"One split is needed, and this data set has {', '.join(dataset)}. "
                f"Choose: HuggingFace(dataset[{next(iter(dataset), 'train')!r}])."
            )
        if not isinstance(dataset, package.Dataset):
            raise DataError(
                f"HuggingFace reads rows by index, and a {type(dataset).__name__} can only be "
                f"streamed. Load it without streaming=True."
            )
        format_, names = dataset.format, dataset.column_names
        self.columns, self._dataset, self._holed = list(columns), dataset, list[str]()
        if format_["type"] == "custom":
            return  # the columns are those that the transform returns
        check_columns(columns, names, "the data set")
        self.columns = self.columns or (
            names if format_["output_all_columns"] else format_["columns"]
        )
        kind = format_["type"] if format_["type"] in TENSORS else "numpy"
        options = format_["format_kwargs"] if kind == format_["type"] else {}
        selected = dataset.select_columns(self.columns)
        self._dataset = selected.with_format(kind, **options)
        self._plain = selected.with_format(None)
        table = dataset.data  # all rows, also those that a filter leaves out
        self._holed = [n for n in self.columns if any(map(_has_nulls, table.column(n).chunks))]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        if self._holed:
            self._check_values(indices)
        rows = self._dataset[indices]
        check_columns(self.columns, list(rows), "a row after the transform")
        arrays = {name: _numbers(name, rows[name]) for name in self.columns or rows}
        for name, array in arrays.items():
            if len(array) != len(indices):
                raise DataError(
                    f"The transform of the data set was given {len(indices)} rows and returned "
                    f"{len(array)} of {name!r}. Change the number of rows beforehand: "
                    f"dataset.map(transform, batched=True)."
                )
        return arrays

    def _check_values(self, indices: np.ndarray) -> None:
        """Raise DataError if a row has no value in a column of numbers."""
        rows = self._plain.select_columns(self._holed)[indices]
        for name in self._holed:
            for row in (i for i, x in zip(indices, rows[name], strict=True) if _has_none(x)):
                raise DataError(
                    f"Column {name!r} has None in row {row} of the data set, and numbers are "
                    f"needed. Leave such rows out, dataset.filter(lambda row: 'None' not in "
                    f"str(row[{name!r}])), or give them a value: dataset.map(fill)."
                )


def check_columns(wanted: Sequence[str], found: Sequence[str], what: object) -> None:
    """Raise DataError if `what` lacks a column."""
    if unknown := [name for name in wanted if name not in found]:
        raise DataError(
            f"Column {unknown[0]!r} was requested, and {what} has {', '.join(found)}. "
            f"Set columns={list(found)[:2]}."
        )


def _has_nulls(array: Any) -> bool:
    """Return whether an Arrow array has nulls, at any depth of lists."""
    inner = (getattr(array, name, None) for name in ("storage", "values"))
    return bool(array.null_count) or any(_has_nulls(each) for each in inner if each is not None)


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _numbers(name: str, column: Any) -> np.ndarray:  # b ...
    values = to_array(column)
    if isinstance(values, list | tuple):
        values = [to_array(value) for value in values]
    try:
        array = np.array(values)
    except ValueError as error:
        raise DataError(
            f"Rows of a batch need one shape, and column {name!r} has several ({error}). Make them "
            f"alike: dataset.map(crop_or_pad)."
        ) from None
    if array.dtype.kind in "biuf":
        return array
    other = next((value for value in values if not isinstance(value, int | float)), values[0])
    raise DataError(
        f"Column {name!r} should hold numbers and holds {type(other).__name__}. Leave it out "
        f"(columns=[...]), or convert it to numbers: dataset.map(encode)."
    )
