"""Images a second from JPEG files: jtrain's workers, Grain by hand, and torch's DataLoader.

512 JPEG files of 500 x 375, in 4 classes, are decoded to 224 x 224 by the same function
(`jtrain.data.images.decode`) in batches of 32, shuffled; what differs is who calls it. Contestants
take turns. In its turn each begins anew, reads as many batches as it reads ahead, and is timed over
the next ones. Ratios are of turns side by side. `--cpu` says what each costs in processor time, its
workers' too, which a machine that others use does not change much.

    pip install torch pillow
    python benchmarks/reading_images.py [--rounds 10] [--batches 12] [--cpu]
"""

import argparse
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Grain imports JAX

import numpy as np
from pairs import machine, ratio, table, take_turns

from jtrain.data import Shuffled
from jtrain.data.batches.workers import Workers
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.images.image_folder import ImageFiles, ImageFolder, find_images

SIZE, ROWS, WORKERS, AHEAD = ImageSize(height=224, width=224), 32, 2, 2
OURS = f"jtrain, {WORKERS} threads"


def write_images(folder: Path, count: int = 512) -> None:
    """Write JPEG files that look like photographs to a decoder: smooth, with some noise."""
    from PIL import Image

    for number in range(count):
        draw = np.random.default_rng(number)
        small = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + draw.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / f"class{number % 4}" / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(path, quality=85)


class Decoded:
    """The rows one by one, as a data set of Grain or torch."""

    def __init__(self, files: ImageFiles):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.files.root / self.files.paths[int(index)]
        return {"image": decode_image(path, SIZE), "label": self.files.label[int(index)]}


def by_jtrain(source: Any, workers: Workers, count: int) -> Iterator[Any]:
    """So many batches by jtrain."""
    reader = workers.build(Shuffled(source, size=ROWS).__getitem__, start=0, stop=count)
    try:
        for step in range(count):
            yield reader(step)
    finally:
        reader.close()


def by_grain(rows: Decoded, processes: bool, count: int) -> Iterator[Any]:
    """So many batches by Grain, as its documentation has them."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    data = grain.MapDataset.source(rows).shuffle(seed=0).repeat()[: count * ROWS]
    if processes:
        how = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=AHEAD)
        reads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        batches = iter(data.to_iter_dataset(reads).batch(ROWS).mp_prefetch(how))
    else:
        ahead = WORKERS * AHEAD * ROWS
        reads = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=ahead)
        batches = iter(data.to_iter_dataset(reads).batch(ROWS))
    try:
        yield from batches
    finally:
        batches.close()


def by_torch(rows: Decoded, workers: int, count: int) -> Iterator[Any]:
    """So many batches by torch."""
    torch = importlib.import_module("torch")  # not among our own

    # With replacement: an epoch of many, for at the end of one all that was read ahead is used up.
    endless = torch.utils.data.RandomSampler(rows, replacement=True, num_samples=count * ROWS)
    loader = torch.utils.data.DataLoader(
        rows,  # pyright: ignore[reportArgumentType]
        batch_size=ROWS,
        sampler=endless,
        num_workers=workers,
        collate_fn=collate,
        prefetch_factor=AHEAD if workers else None,
    )
    yield from loader


def collate(found: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Put rows together."""
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


def timed(begin: Callable[[int], Iterator[Any]], batches: int, warmup: int) -> float:
    """Return the milliseconds an image, over so many batches after the first."""
    reading = begin(2 * warmup + batches)  # more than is read ahead at the end of the time
    for _ in range(warmup):
        next(reading)
    started = time.perf_counter()
    for _ in range(batches):
        next(reading)
    seconds = time.perf_counter() - started
    reading.close()  # pyright: ignore[reportAttributeAccessIssue]
    return seconds / (batches * ROWS) * 1e3


def processor(begin: Callable[[int], Iterator[Any]], batches: int) -> float:
    """Return processor milliseconds an image: the cost of so many more batches, with workers."""

    def spent(count: int) -> float:
        before = _processor_seconds()
        for _ in begin(count):
            pass
        return _processor_seconds() - before

    spent(1)  # what is imported at the first use is not part of it
    few = spent(WORKERS)
    return (spent(WORKERS + batches) - few) / (batches * ROWS) * 1e3


def _processor_seconds() -> float:
    """Return the CPU time of this process and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Images a second from JPEG files.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--cpu", action="store_true", help="processor time in place of time")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "images"
        folder.mkdir()
        write_images(folder)
        paths, labels, _ = find_images(folder)
        files = ImageFiles(folder, paths, labels, size=SIZE)
        rows = Decoded(files)
        kept = {
            where: ImageFolder(folder=str(folder), cache=where).build().train
            for where in ("memory", str(Path(scratch) / "cache"))
        }
        for source in kept.values():
            source[np.arange(len(source))]
        memory, disk = kept.values()
        threads = Workers(count=WORKERS, ahead=AHEAD)
        processes = Workers(count=WORKERS, ahead=AHEAD, kind="processes")
        contestants = {
            "jtrain, no workers": lambda n: by_jtrain(files, Workers(), n),
            OURS: lambda n: by_jtrain(files, threads, n),
            f"jtrain, {WORKERS} processes": lambda n: by_jtrain(files, processes, n),
            f"Grain by hand, {WORKERS} threads": lambda n: by_grain(rows, False, n),
            f"Grain by hand, {WORKERS} processes": lambda n: by_grain(rows, True, n),
            "torch DataLoader, no workers": lambda n: by_torch(rows, 0, n),
            f"torch DataLoader, {WORKERS} workers": lambda n: by_torch(rows, WORKERS, n),
            "jtrain, cached in memory": lambda n: by_jtrain(memory, Workers(), n),
            "jtrain, cached in a folder": lambda n: by_jtrain(disk, Workers(), n),
        }
        if given.cpu:
            print(machine())
            for name, begin in contestants.items():
                print(f"{name:32} {processor(begin, given.batches):6.2f} ms an image", flush=True)
            return 0
        warmup = WORKERS * AHEAD + 1
        turns = {
            name: (lambda begin=begin: timed(begin, given.batches, warmup))
            for name, begin in contestants.items()
        }
        times = take_turns(turns, given.rounds)
    print(machine(), end="\n\n")
    print(table(times, "ms an image", OURS))
    peers = [name for name in times if name.startswith(("Grain", "torch")) and "no" not in name]
    print("\nimages a second of the peers over those of " + OURS)
    for name in peers:
        print(f"    {name}: {ratio(times[OURS], times[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
