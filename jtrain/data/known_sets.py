"""Known sets of images and text: digits, Fashion-MNIST and Shakespeare."""

import hashlib
import lzma
import re
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.data.images.image_dataset import FILES, ImageDataset, read_dataset
from jtrain.data.sources.arrays import Arrays, hold_out
from jtrain.data.sources.files import (
    fetch_folder,
    find_set,
    open_decompressed,
    package_folder,
    plain_or_packed,
)
from jtrain.data.text.corpora import Corpus, build_corpus
from jtrain.data.text.documents import read_text
from jtrain.errors import DataError
from jtrain.io.object_store import is_address

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package


@configclass
class FashionMnist:
    """70,000 grey images of clothes, 28 x 28, in 10 classes: 60,000 for training, 10,000 for test.

    Source: Xiao, Rasul and Vollgraf 2017, https://arxiv.org/abs/1708.07747; MIT licence.
    """

    kind: Literal["fashion_mnist"] = "fashion_mnist"
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The share of the 60,000 that is held out for validation; 0 validates on the test set."""

    def build(self) -> ImageDataset:
        """Read the images as bytes and their classes.

        Raises:
            DataError: if the files do not exist or are incomplete.
        """
        command = "apt-get install dataset-fashion-mnist"
        paths = find_set("fashion-mnist", FILES, FASHION_MNIST, command)
        return read_dataset(paths, classes=10, validation=self.validation)


DIGITS = "digits.csv"
DIGIT = re.compile(r"(\d+(\.\d*)?,){64}\d(\.0*)?")  # a line
INKS = 16  # a pixel counts the inked pixels in a block of 4 x 4


@configclass
class Digits:
    """1,797 handwritten digits, 8 x 8, in 10 classes.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (the test part),
    https://archive.ics.uci.edu/dataset/80; CC BY 4.0.
    """

    kind: Literal["digits"] = "digits"
    validation: float = Field(default=0.2, gt=0, lt=1)
    """The share of the rows that is held out for validation."""

    def build(self) -> ImageDataset:
        """Read images in 0 .. 1 (float32, b 8 8 1); the held-out rows are validation and test.

        Raises:
            DataError: if the file does not exist or is incomplete.
        """
        installed = package_folder("sklearn", "datasets/data")
        (path,) = find_set("digits", [DIGITS], installed, "pip install scikit-learn")
        train, held_out = hold_out(read_digits(path), self.validation)
        return ImageDataset(train, held_out, held_out, (8, 8, 1), 10)


def read_digits(path: Path) -> Arrays:
    """Read `image` (float32, b 8 8 1, in 0 .. 1) and `label` (int32, b): 64 pixels and a digit a
    line.

    Raises:
        DataError: a line that is not a digit, by its number.
    """
    with open_decompressed(path) as stream:
        lines = stream.read().decode("ascii", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not DIGIT.fullmatch(line) or max(map(float, line.split(",")[:-1])) > INKS:
            raise DataError(
                f"{path}:{number} should hold 64 numbers in 0 .. {INKS} and a digit, and has "
                f"{line[:40]!r}. It is cut off or another file: pip install scikit-learn"
            )
    table = np.array([line.split(",") for line in lines], np.float32).reshape(-1, 65)
    images, labels = table[:, :-1].reshape(-1, 8, 8, 1), table[:, -1]
    return Arrays(image=images / INKS, label=labels.astype(np.int32))


def read_plays() -> dict[str, str]:
    """Return each play by its name, in the order of their names: `hamlet`, `henry-iv-part-1`.

    A speech is its speaker's name and a colon, its lines, and an empty line.
    """
    packed = (Path(__file__).with_name("plays") / "plays.txt.xz").read_bytes()
    _, *parts = re.split(r"^# (.*)\n", lzma.decompress(packed).decode("ascii"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def split_play(play: str) -> tuple[str, str]:
    """Split a play between two speeches: the first nine tenths and the rest."""
    cut = play.rindex("\n\n", 0, len(play) * 9 // 10) + 2
    return play[:cut], play[cut:]


@configclass
class Shakespeare:
    """The plays of Shakespeare, character by character. The last tenth of every play is held out
    for validation, so that both parts have the same speakers and the same kinds of play."""

    kind: Literal["shakespeare"] = "shakespeare"
    context: int = Field(default=64, gt=0)
    """Context length in characters."""

    def build(self) -> Corpus:
        """Return 4.2 million characters for training and 0.47 million for validation."""
        train, validation = zip(*map(split_play, read_plays().values()), strict=True)
        return build_corpus("".join(train), "".join(validation), context=self.context)


TINY, TINY_FILE = "tinyshakespeare", "input.txt"
TINY_DIGEST = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_SOURCE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
TINY_COMMAND = f"curl --create-dirs -o {{data}}/{TINY}/{TINY_FILE} {TINY_SOURCE}/{TINY_FILE}"


@configclass
class TinyShakespeare:
    """1,115,394 characters of 65 kinds; the last tenth is held out for validation.

    Sources: https://github.com/karpathy/char-rnn (the text), https://github.com/karpathy/nanoGPT
    (the split).
    """

    kind: Literal["tiny_shakespeare"] = "tiny_shakespeare"
    context: int = Field(default=64, gt=0)
    """Context length in characters."""

    def build(self) -> Corpus:
        """Return 1,003,854 characters for training and 111,540 for validation.

        Raises:
            DataError: if the file does not exist, or is another text.
        """
        (path,) = find_set(TINY, [TINY_FILE], None, TINY_COMMAND)
        text = read_text(path)
        if (found := hashlib.sha256(text.encode()).hexdigest()) != TINY_DIGEST:
            raise DataError(
                f"{path} is not the text that published results are measured on: its sha256 is "
                f"{found[:12]}..., not {TINY_DIGEST[:12]}.... Get it again, or train on it as it "
                f"is: data.kind=text data.path={path}"
            )
        cut = len(text) * 9 // 10
        return build_corpus(text[:cut], text[cut:], context=self.context)


@configclass
class IdxImages:
    """A folder of four idx files named as MNIST's, plain or `.gz`."""

    kind: Literal["idx"] = "idx"
    folder: str
    """The folder of `train-images-idx3-ubyte` and the others; relative to the working folder."""
    classes: int = Field(gt=1)
    """Number of classes; labels are 0 .. classes-1."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """The share of the training rows held out for validation; 0 validates on the test."""

    def build(self) -> ImageDataset:
        """Read the images as bytes and their classes.

        Raises:
            DataError: if a file does not exist or is incomplete, or a label is out of range.
        """
        folder = fetch_folder(self.folder) if is_address(self.folder) else Path(self.folder)
        paths = [_find_idx(folder, name) for name in FILES]
        return read_dataset(paths, classes=self.classes, validation=self.validation)


def _find_idx(folder: Path, name: str) -> Path:
    if path := plain_or_packed(folder / name):
        return path
    contents = ", ".join(sorted(path.name for path in folder.glob("*"))[:6]) or "nothing"
    raise DataError(
        f"{folder} (working folder: {Path.cwd()}) lacks {name}, plain or .gz; it holds {contents}. "
        f"Rename the intended file, or set data.folder= to a folder that has {', '.join(FILES)}."
    )
