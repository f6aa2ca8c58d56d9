"""Corruption of checkpoint files: random damage, chosen by a seed, to real files."""

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
    """Return all files of a step, including the seal."""
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(step: Path, draw: random.Random) -> str:
    """Flip one bit; every byte of the checkpoint is equally likely."""
    files = files_of(step)
    (path,) = draw.choices(files, [path.stat().st_size for path in files])
    data = bytearray(path.read_bytes())
    index, bit = draw.randrange(len(data)), draw.randrange(8)
    data[index] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {index} of {path.name}"


def flip_in_any_file(step: Path, draw: random.Random) -> str:
    """Flip one bit; every file is equally likely."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    data = bytearray(path.read_bytes())
    index = draw.randrange(len(data))
    data[index] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"byte {index} of {path.name}"


def cut(step: Path, draw: random.Random) -> str:
    """Truncate a file."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size}"


def zero(step: Path, draw: random.Random) -> str:
    """Overwrite 4 KiB that are not zero with zeros."""
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
    """Delete a file."""
    path = draw.choice(files_of(step))
    path.unlink()
    return f"{path.name} deleted"


def empty(step: Path, draw: random.Random) -> str:
    """Empty a file."""
    path = draw.choice([path for path in files_of(step) if path.stat().st_size])
    path.write_bytes(b"")
    return f"{path.name} emptied"


def extra(step: Path, draw: random.Random) -> str:
    """Add a file."""
    path = draw.choice(files_of(step)).parent / f"{draw.getrandbits(128):032x}"
    path.write_bytes(draw.randbytes(draw.randrange(100)))
    return f"{path.name} added"


def swap(step: Path, draw: random.Random) -> str:
    """Swap two files."""
    while True:
        one, other = draw.sample(files_of(step), 2)
        first, second = one.read_bytes(), other.read_bytes()
        if first != second:
            one.write_bytes(second)
            other.write_bytes(first)
            return f"{one.name} and {other.name} swapped"


def from_another_step(step: Path, draw: random.Random) -> str:
    """Replace a file by the different file of the previous step."""
    before = step.with_name(str(int(step.name) - 1))
    same = {path.relative_to(step) for path in files_of(step)}
    same &= {path.relative_to(before) for path in files_of(before)}
    other = [p for p in sorted(same) if (step / p).read_bytes() != (before / p).read_bytes()]
    path = draw.choice(other)
    shutil.copyfile(before / path, step / path)
    return f"{path} from step {before.name}"


def another_step(step: Path, draw: random.Random) -> str:
    """Replace the checkpoint by a valid checkpoint of another step."""
    del draw
    shutil.rmtree(step)
    shutil.copytree(step.with_name(str(int(step.name) - 1)), step)
    return "all files of another step"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    flip, flip_in_any_file, cut, zero, delete, empty, extra, swap, from_another_step, another_step,
)  # fmt: skip


def damage_and_check(directory: Path, seed: int, kinds: tuple = KINDS) -> tuple[str, list[str]]:
    """Damage step 2 of a directory; return the damage and the faults that jtrain finds."""
    draw = random.Random(seed)
    damage = kinds[seed % len(kinds)](directory / "2", draw)
    if 2 not in checkpoints.list_named_steps(directory):
        return damage, ["no longer a checkpoint"]
    return damage, checkpoints.find_faults(directory, 2, full=True)


def corruption(seed: int, folder: Path) -> Trial:
    """Damage ten checkpoints, one for each kind of damage; every damage has to be found."""
    began, wrong, damages = time.monotonic(), "", []
    template = folder / "two-steps"
    if not template.exists():
        shutil.rmtree(copy_of_template(folder, "made"))
    home = folder / f"corruption-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    for number in range(len(KINDS)):
        hurt = home / str(number)
        shutil.copytree(template / "saved", hurt)
        damage, found = damage_and_check(hurt, seed * len(KINDS) + number)
        damages.append(damage)
        if not found:
            wrong = f"{damage} was not found ({hurt})"
            break
    if not wrong:
        shutil.rmtree(home)
    detail = wrong or "; ".join(damages)
    return Trial("corruption", seed, not wrong, time.monotonic() - began, detail)
