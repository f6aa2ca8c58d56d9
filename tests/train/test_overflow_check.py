"""The overflow check keeps batches on the reader's thread while the loop looks for one."""

from collections.abc import Mapping, Sequence
from typing import Any

from chaos.numbers import config
from jtrain.train.bad_step_policy import OverflowCheck
from jtrain.train.setup import set_up


class Batches(Sequence):
    """Batches of a call, during whose reading the reader's thread keeps those of another call."""

    def __init__(self, check: OverflowCheck, first: int):
        self._check, self._first = check, first

    def __len__(self) -> int:
        self._check.observe(99, [])
        return 1

    def __getitem__(self, index: Any) -> Mapping[str, Any]:
        return {"first": self._first}


def test_a_batch_is_found_while_others_are_kept():
    check = OverflowCheck(set_up(config("run")))
    for first in (1, 0):
        check.observe(first, Batches(check, first))
    assert check._batch(2) == {"first": 1}
