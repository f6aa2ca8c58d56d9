"""Data sets outside the package: the folders searched, and the message if a set is missing."""

import os
import re
import sys
from pathlib import Path

import pytest

from jtrain.data.sources.known_sets import (
    DataPackage,
    cache_dir,
    debian_package,
    find_set,
    python_package,
)
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


def test_the_cache_is_below_xdg_cache_home(home, tmp_path, monkeypatch):
    assert cache_dir() == home / ".cache/jtrain/data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fast disk"))
    expected = write_files(tmp_path / "fast disk/jtrain/data/shirts", *FILES)
    assert find_set("shirts", FILES, package(tmp_path)) == expected


def test_a_plain_file_is_preferred_to_a_packed_one(home, tmp_path):
    write_files(cache_dir() / "shirts", "images", "images.gz", "labels.gz")
    names = [path.name for path in find_set("shirts", FILES, package(tmp_path))]
    assert names == ["images", "labels.gz"]


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


def test_commands_quote_a_folder_with_a_space(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fast disk"))
    with pytest.raises(DataError, match=rf"mkdir -p '{tmp_path}/fast disk/jtrain/data' &&"):
        find_set("shirts", FILES, package(tmp_path))


def test_a_python_package_is_found_and_not_imported(home, tmp_path, monkeypatch):
    (image,) = write_files(tmp_path / "wardrobe/data", "shirts.csv.gz")
    (tmp_path / "wardrobe/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = python_package("wardrobe-shirts", "wardrobe", "data")
    assert find_set("shirts", ["shirts.csv"], found) == [image]
    assert "wardrobe" not in sys.modules


def test_a_missing_python_package_is_reported_with_its_pip_command(home):
    absent = python_package("wardrobe-shirts", "no_such_wardrobe", "data")
    with pytest.raises(DataError, match=r"\n  pip install wardrobe-shirts\n"):
        find_set("shirts", ["shirts.csv"], absent)
    expected = write_files(cache_dir() / "no_such_wardrobe/data", "shirts.csv")  # a wheel, unpacked
    assert find_set("shirts", ["shirts.csv"], absent) == expected
    assert "JTRAIN_DATA" not in os.environ
