"""What can happen to the files of a checkpoint: drawn by a seed, done to real files."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from chaos.points import copy_of_template
from chaos.trial import Trial
from jtrain.checkpoint import layout as checkpoints


def files_of(step: Path) -> list[Path]:
    """All its files, the seal among them."""
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(step: Path, draw: random.Random) -> str:
    """One bit, each byte of the checkpoint as likely as another."""
    files = files_of(step)
    (path,) = draw.choices(files, [path.stat().st_size for path in files])
    data = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place} of {path.name}"


def flip_in_any_file(step: Path, draw: random.Random) -> str:
    """One bit, each file as likely as another."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"byte {place} of {path.name}"


def cut(step: Path, draw: random.Random) -> str:
    """A file ends too early."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size}"


def zero(step: Path, draw: random.Random) -> str:
    """4 KiB of zeros where something else was."""
    while True:
        path = draw.choice(files_of(step))
        data = bytearray(path.read_bytes())
        first = draw.randrange(0, max(1, len(data)), 4096)
        block = data[first : first + 4096]
        if any(block):
            data[first : first + 4096] = bytes(len(block))
            path.write_bytes(data)
            return f"zeros from {first} of {path.name}"


def delete(step: Path, draw: random.Random) -> str:
    """A file is gone."""
    path = draw.choice(files_of(step))
    path.unlink()
    return f"{path.name} deleted"


def empty(step: Path, draw: random.Random) -> str:
    """A file is there, and nothing in it."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    path.write_bytes(b"")
    return f"{path.name} emptied"


def extra(step: Path, draw: random.Random) -> str:
    """A file too many."""
    path = draw.choice(files_of(step)).parent / f"{draw.getrandbits(128):032x}"
    path.write_bytes(draw.randbytes(draw.randrange(100)))
    return f"{path.name} added"


def swap(step: Path, draw: random.Random) -> str:
    """Two files have changed places."""
    while True:
        one, other = draw.sample(files_of(step), 2)
        first, second = one.read_bytes(), other.read_bytes()
        if first != second:
            one.write_bytes(second)
            other.write_bytes(first)
            return f"{one.name} and {other.name} swapped"


def from_another_step(step: Path, draw: random.Random) -> str:
    """A file as it is in the step before; the whole of it where the names differ."""
    before = step.with_name(str(int(step.name) - 1))
    same = {path.relative_to(step) for path in files_of(step)}
    same &= {path.relative_to(before) for path in files_of(before)}
    other = [p for p in sorted(same) if (step / p).read_bytes() != (before / p).read_bytes()]
    path = draw.choice(other)
    shutil.copyfile(before / path, step / path)
    return f"{path} from step {before.name}"


def another_step(step: Path, draw: random.Random) -> str:
    """A whole checkpoint under another's number."""
    del draw
    shutil.rmtree(step)
    shutil.copytree(step.with_name(str(int(step.name) - 1)), step)
    return "the whole of another step"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    flip, flip_in_any_file, cut, zero, delete, empty, extra, swap, from_another_step, another_step,
)  # fmt: skip


def seen(directory: Path, seed: int, kinds: tuple = KINDS) -> tuple[str, list[str]]:
    """What was done to step 2 of a directory by a seed, and what is said to be wrong with it."""
    draw = random.Random(seed)
    damage = kinds[seed % len(kinds)](directory / "2", draw)
    if 2 not in checkpoints.named_steps(directory):
        return damage, ["it is no checkpoint any more"]
    return damage, checkpoints.find_faults(directory, 2, full=True)


def corruption(seed: int, folder: Path) -> Trial:
    """Ten damages, one of each kind, each to a checkpoint of its own; each is seen."""
    began, wrong, told = time.monotonic(), "", []
    template = folder / "two-steps"
    if not template.exists():
        shutil.rmtree(copy_of_template(folder, "made"))
    home = folder / f"corruption-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    for number in range(len(KINDS)):
        hurt = home / str(number)
        shutil.copytree(template / "saved", hurt)
        damage, found = seen(hurt, seed * len(KINDS) + number)
        told.append(damage)
        if not found:
            wrong = f"{damage} was not seen ({hurt})"
            break
    if not wrong:
        shutil.rmtree(home)
    detail = wrong or "; ".join(told)
    return Trial("corruption", seed, not wrong, time.monotonic() - began, detail)
