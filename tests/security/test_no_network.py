"""No test reaches another machine, and CI installs only pinned packages."""

import re
import socket
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("ci-*.txt"))


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("2001:db8::1", 80, 0, 0)])
def test_no_test_can_reach_another_machine(address):
    family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
    with socket.socket(family) as one:
        one.setblocking(False)
        with pytest.raises(AssertionError, match="no test needs a network"):
            one.connect(address)


@pytest.mark.parametrize("host", ["", "0.0.0.0"])
def test_no_test_can_listen_to_other_machines(host: str):
    with socket.socket() as one, pytest.raises(AssertionError, match=r"listen on 127\.0\.0\.1"):
        one.bind((host, 0))


def test_the_loopback_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as listens:
        socket.create_connection(listens.getsockname()).close()


def test_each_python_that_is_supported_has_a_lock():
    assert [path.name for path in LOCKS] == ["ci-3.11.txt", "ci-3.12.txt", "ci-3.13.txt"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_each_required_package_by_digest(lock: Path):
    entries = re.findall(
        r"^([\w.-]+)==(\S+)(?: ;[^\\\n]*)? \\\n((?:    --hash=\S+(?: \\)?\n)+)",
        lock.read_text(),
        re.M,
    )
    lines = [line for line in lock.read_text().splitlines() if line and line[0] not in " #"]
    assert len(entries) == len(lines) > 50, "each line is a package, a version and its digests"
    assert all(re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", e[2]) for e in entries)
    pinned = {canonicalize_name(name): version for name, version, _ in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    asked += project["optional-dependencies"]["dev"]
    for wanted in map(Requirement, asked):
        if wanted.name != "jtrain":
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), wanted
