"""Known sets: where they are searched, MNIST-1D and Shakespeare."""

import re
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close

from experiments.mnist1d import MNIST1D
from jtrain.data.sources.files import DataPackage, cache_dir, debian_package, find_set
from jtrain.errors import DataError

FILES = ["images", "labels"]


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
        assert find_set("shirts", FILES, package(system)) == expected


def test_files_are_never_taken_from_two_places(home, tmp_path):
    write_files(cache_dir() / "shirts", "images")
    write_files(tmp_path / "usr/share/datasets/shirts", "labels")
    with pytest.raises(DataError, match=r"data/shirts, which lacks labels\n") as caught:
        find_set("shirts", FILES, package(tmp_path))
    assert f"{tmp_path}/usr/share/datasets/shirts, which lacks images\n" in str(caught.value)


def test_a_missing_set_is_reported_with_every_folder_and_working_commands(home, tmp_path):
    with pytest.raises(DataError) as caught:
        find_set("shirts", FILES, package(tmp_path))
    message = str(caught.value)
    assert "$JTRAIN_DATA, which is not set" in message
    for place in (cache_dir() / "shirts", tmp_path / "usr/share/datasets/shirts"):
        assert f"\n  {place}\n" in message
    assert "\n  apt-get install dataset-shirts\n" in message
    unpacked = re.search(r"mkdir -p (\S+) && dpkg-deb -x dataset-shirts_\*\.deb (\S+)\n", message)
    assert unpacked
    assert unpacked[1] == unpacked[2]
    write_files(
        Path(unpacked[2]) / "usr/share/datasets/shirts", *FILES
    )  # the result of dpkg-deb -x
    assert find_set("shirts", FILES, package(tmp_path))


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
