"""Slurm's compact notation: lists of hosts, and tasks per node."""

import re
from collections.abc import Iterator

from jtrain.errors import ConfigError

_PARTS = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)(?:,|$)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def parse_hosts(text: str, variable: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Expand a list of hosts: `node[01-03,07],login` -> node01, node02, node03, node07, login.

    Raises:
        ConfigError: if the text is not a list of hosts.

    Source: https://slurm.schedmd.com/scontrol.html#OPT_hostnames.
    """
    parts = _PARTS.findall(text)
    if not parts or sum(len(part) + 1 for part in parts) - 1 != len(text):
        raise _error(text, variable)
    return [host for part in parts for host in _expand(part, text, variable)]


def parse_tasks(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand tasks per node: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        ConfigError: if the text is not a list of counts.
    """
    counts = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if not found:
            raise ConfigError(
                f"{variable} should be tasks per node, such as 2(x4),1, and is {text!r}. Unset it "
                f"to use all devices of the machine in each process."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _expand(part: str, text: str, variable: str) -> Iterator[str]:
    """Yield the hosts of one prefix, with all its brackets."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, closed, after = rest.partition("]")
    if not closed or not inside:
        raise _error(text, variable)
    for piece in inside.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or (high and not high.isdigit()) or int(high or low) < int(low):
            raise _error(text, variable)
        for number in range(int(low), int(high or low) + 1):
            for tail in _expand(after, text, variable) if after else [""]:
                yield f"{before}{number:0{len(low)}}{tail}"


def _error(text: str, variable: str) -> ConfigError:
    return ConfigError(
        f"{variable} should be a list of hosts, such as node[01-04,07], and is {text!r}. Set "
        f"JTRAIN_COORDINATOR, JTRAIN_PROCESSES and JTRAIN_PROCESS instead."
    )
