"""Known sets: where they are searched, their files of images, and held-out shares."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close
from image_files import alone_here, idx_bytes, write_fashion_mnist, write_idx

from experiments.mnist1d import MNIST1D
from jtrain.data.images.image_dataset import FILES, read_idx
from jtrain.data.known_sets import CLASSES, FashionMnist, read_digits
from jtrain.data.sources.arrays import Arrays, hold_out
from jtrain.data.sources.files import DataPackage, cache_dir, debian_package, find_set
from jtrain.errors import DataError


def all_rows(source) -> dict[str, np.ndarray]:
    return source[np.arange(len(source))]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    alone_here(tmp_path, monkeypatch)
    return tmp_path


def test_fashion_mnist_is_bytes_with_a_channel_and_whole_numbers(data: Path):
    write_fashion_mnist(data / "fashion-mnist")
    built = FashionMnist().build()
    rows = all_rows(built.train)
    assert rows["image"].shape == (40, *built.image) == (40, 28, 28, 1)
    assert rows["image"].dtype == np.uint8
    assert rows["label"].dtype == np.int32
    assert rows["label"].tolist() == [*range(10)] * 4
    assert built.classes == len(CLASSES) == 10
    assert built.validation is built.test
    assert len(built.test) == 20


def test_a_share_of_fashion_mnist_is_held_out_and_the_test_is_unchanged(data: Path):
    write_fashion_mnist(data / "fashion-mnist")
    whole = all_rows(FashionMnist().build().train)["image"]
    built = FashionMnist(validation=0.25).build()
    assert (len(built.train), len(built.validation), len(built.test)) == (30, 10, 20)
    parts = [all_rows(part)["image"] for part in (built.train, built.validation)]
    as_set = lambda images: sorted(image.tobytes() for image in images)
    assert as_set(np.concatenate(parts)) == as_set(whole), "every row in one of the two"


def test_digits_are_the_numbers_of_their_lines(data: Path):
    (data / "digits.csv").write_text(",".join(["0", "16", "4", *["8"] * 61, "7"]) + "\n")
    rows = all_rows(read_digits(data / "digits.csv"))
    assert rows["label"].tolist() == [7]
    assert rows["image"].ravel()[:4].tolist() == [0.0, 1.0, 0.25, 0.5]


def test_the_held_out_share_is_pinned_and_mixed():
    train, kept = hold_out(Arrays(x=np.arange(1000)), 0.1)
    rows = all_rows(kept)["x"]
    assert rows[:6].tolist() == [12, 20, 31, 38, 60, 68], "what was measured stays comparable"
    assert sorted([*all_rows(train)["x"], *rows]) == list(range(1000))
    per_hundred = np.bincount(rows // 100, minlength=10)
    assert per_hundred.min() > 3, "from everywhere: sets are often sorted by class"


def test_a_label_out_of_range_is_reported_by_file_and_byte(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[1], np.array([3] * 39 + [10], np.uint8))
    with pytest.raises(DataError, match=r"train-labels.* 0 \.\. 9; label 39, at byte 47, is 10"):
        FashionMnist().build()
    assert (folder / FILES[1]).read_bytes()[47] == 10


IMAGES = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)


@pytest.mark.parametrize(("dtype", "suffix"), [("u1", ".gz"), ("i2", ""), ("f8", ".gz")])
def test_gives_the_array_that_was_written(dtype: str, suffix: str, tmp_path: Path):
    array = (np.arange(24).reshape(4, 3, 2) * 5).astype(dtype)
    got = read_idx(write_idx(tmp_path / f"array{suffix}", array))
    np.testing.assert_array_equal(got, array, strict=True)
    assert got.dtype.isnative


def test_a_file_that_is_cut_off_anywhere_is_refused_with_its_end(tmp_path: Path):
    whole = idx_bytes(IMAGES)
    assert len(whole) == 156
    path = tmp_path / "images"
    for kept in (*range(18), 80, 155):
        path.write_bytes(whole[:kept])
        place = 0 if kept < 4 else kept
        with pytest.raises(DataError, match=rf"{path} .* at byte {place}\b"):
            read_idx(path)


def test_a_packed_file_that_is_cut_off_is_refused_with_its_end(tmp_path: Path):
    packed = gzip.compress(idx_bytes(IMAGES))
    path = tmp_path / "images.gz"
    for place in (0, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:place])
        with pytest.raises(DataError, match=rf"images\.gz .* at byte {place}\b"):
            read_idx(path)


NAMES = ["images", "labels"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a user without data."""
    monkeypatch.delenv("JTRAIN_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_files(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return [folder / name for name in names]


def package(root: Path) -> DataPackage:
    return debian_package("dataset-shirts", "/usr/share/datasets/shirts")._replace(root=root)


def test_each_folder_is_searched_and_the_users_own_comes_first(home, tmp_path, monkeypatch):
    system = tmp_path / "system"
    monkeypatch.setenv("JTRAIN_DATA", str(tmp_path / "mine"))
    places = [
        system / "usr/share/datasets/shirts",
        home / ".cache/jtrain/data/usr/share/datasets/shirts",
        tmp_path / "mine/usr/share/datasets/shirts",
        home / ".cache/jtrain/data/shirts",
        tmp_path / "mine/shirts",
    ]
    for place in places:  # from the last in the search order
        expected = write_files(place, "images.gz", "labels")
        assert find_set("shirts", NAMES, package(system)) == expected


def test_files_are_never_taken_from_two_places(home, tmp_path):
    write_files(cache_dir() / "shirts", "images")
    write_files(tmp_path / "usr/share/datasets/shirts", "labels")
    with pytest.raises(DataError, match=r"data/shirts, which lacks labels\n") as caught:
        find_set("shirts", NAMES, package(tmp_path))
    assert f"{tmp_path}/usr/share/datasets/shirts, which lacks images\n" in str(caught.value)


def test_a_missing_set_is_reported_with_every_folder_and_working_commands(home, tmp_path):
    with pytest.raises(DataError) as caught:
        find_set("shirts", NAMES, package(tmp_path))
    message = str(caught.value)
    assert "$JTRAIN_DATA, which is not set" in message
    for place in (cache_dir() / "shirts", tmp_path / "usr/share/datasets/shirts"):
        assert f"\n  {place}\n" in message
    assert "\n  apt-get install dataset-shirts\n" in message
    unpacked = re.search(r"mkdir -p (\S+) && dpkg-deb -x dataset-shirts_\*\.deb (\S+)\n", message)
    assert unpacked
    assert unpacked[1] == unpacked[2]
    write_files(
        Path(unpacked[2]) / "usr/share/datasets/shirts", *NAMES
    )  # the result of dpkg-deb -x
    assert find_set("shirts", NAMES, package(tmp_path))


@pytest.mark.thorough
def test_the_curves_equal_those_of_the_package():
    train, test = MNIST1D().build()
    curves, labels = train.arrays["curve"], train.arrays["label"]
    assert curves.shape == (4000, 40)
    assert curves.dtype == np.float32
    assert len(test) == 1000
    # From mnist1d 0.0.2.post1: make_dataset(get_dataset_args()).
    first = [
        [-0.33200567, -0.47191037, -0.77869708, -1.00974083],
        [1.96548088, 2.30021254, 2.21339278, 1.98917376],
    ]
    assert_close(curves[:2, :4], first, 1e-6)
    last = [0.65987565, 0.87773435, 1.19315184]
    assert_close(test.arrays["curve"][-1, -3:], last, 1e-6)
    assert labels[:10].tolist() == [2, 6, 4, 5, 6, 6, 6, 0, 3, 1]
