"""A small transformer's steps as the TPU compiler makes them, and what crosses in them."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable, Iterator

# Read when libtpu is loaded: it says its warnings on the standard error.
os.environ |= {"TPU_STDERR_LOG_LEVEL": "1", "TPU_MIN_LOG_LEVEL": "1"}

from made_whole import made_whole

from jtrain.config.resolve import resolve
from jtrain.inspect.plan.collectives import Collective
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import find_topology

CONFIG = "configs/llama2_7b.yaml"
LAYERS, WIDTH, HIDDEN, VOCAB, ROWS, TIME = 4, 1024, 4096, 2048, 16, 256
SMALL = [
    *(f"batch={ROWS}", f"data.vocab={VOCAB}", f"data.context={TIME}", "data.rows=64"),
    *("model.preset=none", "model.vocab=0", f"model.context={TIME}", f"model.layers={LAYERS}"),
    *("model.heads=8", "model.head_size=128", f"model.width={WIDTH}", f"model.hidden={HIDDEN}"),
    *("model.remat=none", "model.attention=xla", "model.norm=rms", "model.activation=swiglu"),
    *("model.bias=false", "model.tied=false", "model.positions={kind: rotary}"),
]
BLOCKS = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)  # elements
TABLES = 2 * VOCAB * WIDTH  # the embedding and the head
BF16, F32 = 2, 4
ACTIVATION = ROWS * TIME * WIDTH * BF16  # bytes, of the batch
# Of the head and of the embedding, once: the head's is summed in float32.
TABLES_GRADIENTS = VOCAB * WIDTH * (BF16 + F32)
GRADIENTS = BLOCKS * BF16 + TABLES_GRADIENTS


@functools.cache
def planned(where: str, *words: str) -> Plan:
    """The plan of the small one on a topology; fails where the compiler makes arrays whole."""
    with heard() as said:
        found = make_plan(resolve(CONFIG, [*SMALL, *words]).config, find_topology(where))
    assert not made_whole(said), made_whole(said)
    return found


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The lines that come on the standard error meanwhile, from whatever library; there after."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().splitlines()


def sum_by_axes(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Bytes that a device sends, by mesh axes and kind."""
    table = {}
    for each in found:
        kinds = table.setdefault(" x ".join(each.axes) or "other", {})
        kinds[each.kind] = kinds.get(each.kind, 0) + each.sent
    return table


def sent(found: Plan, axis: str) -> dict[str, int]:
    """Bytes that a device sends along an axis, by kind."""
    return sum_by_axes(found.collectives).get(axis, {})


def crossing(found: Plan, kind: str, *, back: bool, least: int = 0) -> list[Collective]:
    """Those of a kind on the way forward or back, of more than `least` bytes each time."""
    of = lambda each: each.kind == kind and ("transpose(" in each.where) == back
    return [each for each in found.collectives if of(each) and each.sent > least * each.times]


def bytes_of(found: list[Collective]) -> int:
    """What they send together."""
    return sum(each.sent for each in found)


def near(got: float, want: float, within: float = 0.05) -> bool:
    """Whether they are not farther apart than this share of `want`."""
    return abs(got / want - 1) <= within
