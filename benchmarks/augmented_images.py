"""Augmented images on one core: jtrain's pipeline, Grain's DataLoader and PyTorch's.

(1) 32 x 32 x 3 from memory: padding of 4, crop, flip. (2) 224 x 224 from JPEG files of 500 x 375:
random resized crop, flip. Each gives normalised float32: torch by torchvision (channels first),
Grain by Pillow and numpy, row by row, as their documentation does; jtrain gives bytes, which a
compiled function scales as its models do, and its time counts. The windows of the crop have the
distribution of 8 to 100 % of the file's area and 3:4 to 4:3 in shape, printed as a mean share.

Milliseconds of processor time an image, of all threads, in a process that is bound to one core. A
turn is one epoch of so many rows, from an iterator that is made for it, so all that a loader reads
ahead is used and timed within its own turn. Contestants take turns.

    pip install torch torchvision pillow grain
    python benchmarks/augmented_images.py [--rounds 15] [--batches 8]
"""

import argparse
import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from pairs import machine, ratio, table, take_turns
from reading_images import SIZE, write_images

from jtrain.data import Arrays, Shuffled
from jtrain.data.images.augment import Augment, WindowDraws
from jtrain.data.images.image_folder import ImageFiles, find_images

ROWS = 64
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Transformed:
    """Rows of a source of images, each transformed alone: a data set of Grain or torch."""

    def __init__(self, rows: int, image: Callable[[int], Any], transform: Callable[[Any], Any]):
        self._rows, self._image, self._transform = rows, image, transform

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._transform(self._image(int(index))), "label": int(index) % 10}


def torch_transform(large: bool) -> Callable[[Any], Any]:
    """Return torchvision's transforms."""
    made = importlib.import_module("torchvision.transforms")
    first = made.RandomResizedCrop(224) if large else made.RandomCrop(32, padding=4)
    last = (made.RandomHorizontalFlip(), made.ToTensor(), made.Normalize(MEAN, DEVIATION))
    return made.Compose((first, *last))


def plain_window(draw: Any, width: int, height: int) -> tuple[float, float, float, float]:
    """Draw a window of an image: left, top, right and bottom."""
    share, shape = draw.uniform(0.08, 1), np.exp(draw.uniform(-1, 1) * np.log(4 / 3))
    area = share * width * height
    wide, high = min((area * shape) ** 0.5, width), min((area / shape) ** 0.5, height)
    left, top = draw.uniform(0, width - wide), draw.uniform(0, height - high)
    return left, top, left + wide, top + high


def plain_transform(large: bool) -> Callable[[Any], np.ndarray]:
    """Return the same transforms in Pillow and numpy."""
    draw = np.random.default_rng(0)
    mean, deviation = np.array(MEAN, np.float32), np.array(DEVIATION, np.float32)

    def transform(image: Any) -> np.ndarray:
        if large:
            window = plain_window(draw, image.width, image.height)
            pixels = np.asarray(image.resize((224, 224), resample=2, box=window))
        else:
            top, left = draw.integers(0, 9, 2)
            padded = np.pad(np.asarray(image), ((4, 4), (4, 4), (0, 0)))
            pixels = padded[top : top + 32, left : left + 32]
        pixels = pixels[:, ::-1] if draw.random() < 0.5 else pixels
        return (pixels * np.float32(1 / 255) - mean) / deviation

    return transform


def jtrain_epoch(source: Any, augment: Augment, batches: int) -> Iterator[Any]:
    """Yield jtrain's batches, normalised by a compiled function."""
    import jax

    read = augment.build(Shuffled(source, size=ROWS), classes=10)
    for step in range(batches):
        yield jax.block_until_ready(normalise()(read[step]["image"]))


@functools.cache
def normalise() -> Callable[[np.ndarray], Any]:
    """Return the compiled function that makes floats of bytes."""
    import jax
    import jax.numpy as jnp

    mean, deviation = jnp.array(MEAN), jnp.array(DEVIATION)
    return jax.jit(lambda image: (image.astype(jnp.float32) / 255 - mean) / deviation)


def grain_epoch(rows: Transformed, batches: int, threads: int) -> Iterator[Any]:
    """Yield the batches of Grain's DataLoader; 16 threads are its default."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    sampler = grain.samplers.IndexSampler(batches * ROWS, shuffle=True, seed=0, num_epochs=1)
    batch = grain.transforms.Batch(ROWS, drop_remainder=True)
    reads = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500 if threads else 0)
    yield from grain.DataLoader(
        data_source=rows,  # pyright: ignore[reportArgumentType]
        sampler=sampler,
        operations=[batch],
        read_options=reads,
    )


def torch_epoch(rows: Transformed, batches: int) -> Iterator[Any]:
    """Yield the batches of PyTorch's DataLoader."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    part = torch.utils.data.Subset(rows, range(batches * ROWS))
    yield from torch.utils.data.DataLoader(part, batch_size=ROWS, shuffle=True, drop_last=True)


def timed(begin: Callable[[], Iterator[Any]], batches: int) -> Callable[[], float]:
    """Return a function that measures processor milliseconds an image over an epoch."""

    def run() -> float:
        start = time.process_time()
        count = sum(1 for _ in begin())
        spent = time.process_time() - start
        assert count == batches, f"{count} batches in place of {batches}"
        return spent / (batches * ROWS) * 1e3

    return run


def compare(
    title: str, source: Any, image: Callable, augment: Augment, large: bool, given: Any
) -> None:
    """Print the table of one setting."""
    count = given.batches
    grain_rows = Transformed(len(source), image, plain_transform(large))
    torch_rows = Transformed(len(source), image, torch_transform(large))
    contestants = {
        "jtrain": lambda: jtrain_epoch(source, augment, count),
        "Grain, no threads": lambda: grain_epoch(grain_rows, count, 0),
        "Grain, 16 threads": lambda: grain_epoch(grain_rows, count, 16),
        "PyTorch": lambda: torch_epoch(torch_rows, count),
    }
    runs = {name: timed(begin, count) for name, begin in contestants.items()}
    times = take_turns(runs, given.rounds)
    print(f"\n{title}\n\n{table(times, 'ms an image', 'jtrain')}\n")
    for name in list(contestants)[1:]:
        print(f"images a second, jtrain over {name}: {ratio(times[name], times['jtrain'])}")


def mean_shares() -> str:
    """Describe the windows of each: the mean share of the area of an image of 500 x 375."""
    made = importlib.import_module("torchvision.transforms")
    torch = importlib.import_module("torch")
    rng, rows = np.random.default_rng(0), 4000
    ours = WindowDraws(0.08, rng.random((4, rows))).windows(375, 500, 1.0)
    plain = [plain_window(rng, 500, 375) for _ in range(rows)]
    empty = torch.empty(3, 375, 500)
    crop = made.RandomResizedCrop
    theirs = [crop.get_params(empty, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(rows)]
    shares = {
        "jtrain": ours[:, 2] * ours[:, 3],
        "Grain": [(right - left) * (low - top) for left, top, right, low in plain],
        "PyTorch": [high * wide for _, _, high, wide in theirs],
    }
    means = (f"{name} {np.mean(one) / (500 * 375):.3f}" for name, one in shares.items())
    return "mean share of a window: " + ", ".join(means)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Augmented images a second of one core.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=8)
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX and torch count the cores
    pillow = importlib.import_module("PIL.Image")
    print(machine())
    print(mean_shares())
    pixels = np.random.default_rng(0).integers(0, 256, (4096, 32, 32, 3), np.uint8)
    arrays = Arrays(image=pixels, label=np.arange(4096, dtype=np.int32) % 10)
    compare(
        "32 x 32 from memory",
        arrays,
        lambda index: pillow.fromarray(pixels[index]),
        Augment(flip=0.5, crop=4),
        False,
        given,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        paths, labels, _ = find_images(Path(folder))
        files = ImageFiles(Path(folder), paths, labels, size=SIZE)
        compare(
            "224 x 224 from JPEG files",
            files,
            lambda index: pillow.open(files.root / files.paths[index]).convert("RGB"),
            Augment(flip=0.5, zoom=0.08),
            True,
            given,
        )


if __name__ == "__main__":
    main()
