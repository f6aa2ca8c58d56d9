"""Fashion-MNIST and digits: their arrays, and the held-out shares."""

from pathlib import Path

import numpy as np
import pytest
from image_files import alone_here, write_digits, write_fashion_mnist, write_idx

from jtrain.data.images.digits import Digits, read_digits
from jtrain.data.images.idx_images import CLASSES, FashionMnist, IdxImages
from jtrain.data.images.image_dataset import FILES
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.subset import Subset, hold_out, some_rows
from jtrain.errors import DataError


def all_rows(source) -> dict[str, np.ndarray]:
    return source[np.arange(len(source))]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    alone_here(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_is_bytes_with_a_channel_and_whole_numbers(data: Path, suffix: str):
    write_fashion_mnist(data / "fashion-mnist", suffix=suffix)
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


def test_digits_are_numbers_up_to_one(data: Path):
    write_digits(data / "digits")
    built = Digits().build()
    rows = all_rows(built.train)
    assert rows["image"].shape == (48, *built.image) == (48, 8, 8, 1)
    assert rows["image"].dtype == np.float32
    assert 0 == rows["image"].min() < rows["image"].max() <= 1
    assert len(built.validation) == 12


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


def test_a_subset_has_its_rows_in_its_order():
    some = Subset(Arrays(x=np.arange(10) * 10), np.array([7, 2, 2]))
    assert some[np.array([2, 0])]["x"].tolist() == [20, 70]


def test_a_label_out_of_range_is_reported_by_file_and_byte(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[1], np.array([3] * 39 + [10], np.uint8))
    with pytest.raises(DataError, match=r"train-labels.* 0 \.\. 9; label 39, at byte 47, is 10"):
        FashionMnist().build()
    assert (folder / FILES[1]).read_bytes()[47] == 10


def test_files_that_were_swapped_are_reported(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[0], np.zeros(40, np.uint8))
    with pytest.raises(DataError, match=r"uint8 of shape \(40,\).*images \(idx3-ubyte\) first"):
        FashionMnist().build()
    for name in FILES[:2]:
        write_idx(folder / name, np.zeros((40, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"shape \(40, 28, 28\).*labels \(idx1-ubyte\) second"):
        FashionMnist().build()


def test_files_of_two_sets_are_reported(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[1], np.zeros(41, np.uint8))
    with pytest.raises(DataError, match=r"has 40 images and .* 41 labels"):
        FashionMnist().build()


def test_images_of_two_sizes_are_reported(data: Path):
    folder = write_fashion_mnist(data / "fashion-mnist")
    write_idx(folder / FILES[2], np.zeros((20, 28, 30), np.uint8))
    with pytest.raises(DataError, match=r"images of 28 x 28 x 1 and .* of 28 x 30 x 1"):
        FashionMnist().build()


def test_a_users_folder_is_a_set(data: Path):
    write_fashion_mnist(data / "my letters", suffix=".gz")
    built = IdxImages(folder=str(data / "my letters"), classes=12, validation=0.1).build()
    assert (len(built.train), len(built.validation), len(built.test)) == (36, 4, 20)
    assert built.classes == 12


def test_a_folder_that_lacks_a_file_is_reported_with_its_content(data: Path):
    folder = write_fashion_mnist(data / "letters")
    (folder / FILES[3]).rename(folder / "labels.txt")
    with pytest.raises(DataError, match=rf"lacks {FILES[3]}.* holds labels\.txt, t10k-images"):
        IdxImages(folder=str(folder), classes=10).build()
    with pytest.raises(DataError, match=r"There is no folder .*lettres"):
        IdxImages(folder=str(data / "lettres"), classes=10).build()


def test_a_missing_set_is_reported_with_the_commands(data: Path):
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        FashionMnist().build()


def test_a_line_that_is_no_digit_is_reported_by_line_and_byte(data: Path):
    line = ",".join(["1"] * 65) + "\n"
    for foreign in ("1,2,3", "a" + line[1:], "17" + line[1:], line[:-2] + "12"):
        (data / "digits.csv").write_text(line + foreign + "\n")
        with pytest.raises(DataError, match=rf"digits\.csv:2 .* at byte {len(line)} has"):
            read_digits(data / "digits.csv")


def test_a_share_of_no_or_all_rows_is_reported():
    rows = Arrays(x=np.arange(20))
    for share, found in ((0.001, "none"), (0.99, "all")):
        with pytest.raises(DataError, match=rf"20 rows .* {found} of them.*validation=0\.1\."):
            hold_out(rows, share)
    assert len(hold_out(rows, 0.1)[1]) == 2
    with pytest.raises(DataError, match="Give at least 2 rows"):
        hold_out(Arrays(x=np.arange(1)), 0.5)


def test_some_rows_are_drawn_the_same_each_time_and_keep_their_order():
    source = Arrays(x=np.arange(50))
    some = some_rows(source, 12)
    drawn = some[np.arange(12)]["x"]
    assert (np.diff(drawn) > 0).all()
    assert drawn[-1] > 12, "they are not the first ones"
    np.testing.assert_array_equal(some_rows(source, 12).indices, some.indices)
    with pytest.raises(DataError, match=r"data.rows=51 .* of 50. Set data.rows=50, or 0 for all"):
        some_rows(source, 51)
