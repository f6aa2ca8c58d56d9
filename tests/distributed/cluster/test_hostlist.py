"""Slurm's compact lists, against the expanded lists."""

import pytest

from jtrain.distributed.cluster.hostlist import parse_hosts, parse_tasks
from jtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("node07", "node07"),
        ("a,b", "a b"),
        ("node[01-04,07]", "node01 node02 node03 node04 node07"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("gpu[1,3],login,big[7-8]", "gpu1 gpu3 login big7 big8"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a[1-2].net", "a1.net a2.net"),
    ],
)
def test_lists_of_hosts(short: str, long: str):
    assert parse_hosts(short) == long.split()


@pytest.mark.parametrize("text", ["", "node[", "node[1-]x[", "node[a-b]", "node[4-1]", "a,,b"])
def test_refuses_an_invalid_list_of_hosts(text: str):
    with pytest.raises(ConfigError, match=r"should be a list of hosts.*Set JTRAIN_COORDINATOR"):
        parse_hosts(text)


def test_tasks_of_each_node():
    assert parse_tasks("2(x3),1") == [2, 2, 2, 1]
    assert parse_tasks("4") == [4]
    with pytest.raises(ConfigError, match=r"such as 2\(x4\),1, and is '2x3'"):
        parse_tasks("2x3")
