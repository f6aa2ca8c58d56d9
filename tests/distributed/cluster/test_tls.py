"""With certificates, only a process that has one meets the others; `jtrain launch` makes them."""

import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from plain_environ import plain_environ
from test_rendezvous import SAME, ends, member

from jtrain.distributed.cluster import tls
from jtrain.distributed.cluster.tls import PeerTls, takes_certificates, throwaway_certificate
from jtrain.distributed.port import free_port
from jtrain.errors import ConfigError

SHORT = 1.5  # seconds within which two that do not meet connect
HAS_TLS = takes_certificates(metadata.version("jax"))
needs_tls = pytest.mark.skipif(
    not HAS_TLS, reason=f"jax {metadata.version('jax')} takes no certificates: jax>=0.11.2 does"
)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    """The variables of a launch under a JAX that takes certificates."""
    monkeypatch.setattr(tls, "takes_certificates", lambda _: True)
    with throwaway_certificate({}) as found:
        assert sorted(found) == sorted([tls.CERTIFICATE, tls.KEY, tls.AUTHORITY])
        yield found


def peer_of(variables: dict[str, str]) -> PeerTls:
    found = PeerTls.read(variables, supported=True)
    assert found is not None
    return found


def pair(one: PeerTls | None, other: PeerTls | None, timeout: float = 5.0) -> list[Exception]:
    """Return the errors of two processes that meet, each with its certificate."""
    port = free_port()
    both = [(member(index, 2, port), SAME) for index in range(2)]
    return list(filter(None, ends(both, timeout, ({"tls": one}, {"tls": other}))))


def test_processes_of_one_launch_meet(variables: dict[str, str]):
    assert pair(peer_of(variables), peer_of(variables)) == []


def test_a_process_without_a_certificate_is_turned_away(variables: dict[str, str]):
    said = "\n".join(map(str, pair(peer_of(variables), None, timeout=SHORT)))
    assert "or it takes only processes with a certificate (JAX_MTLS_CERT_FILE)" in said
    assert "process 1 did not" in said
    assert "Turned away: 127.0.0.1 without a valid certificate (" in said


@pytest.mark.thorough
def test_a_certificate_of_another_launch_is_turned_away(variables: dict[str, str]):
    with throwaway_certificate({}) as others:
        said = "\n".join(map(str, pair(peer_of(variables), peer_of(others), timeout=SHORT)))
    assert "or the certificates do not fit (CERTIFICATE_VERIFY_FAILED)" in said
    assert "Turned away: 127.0.0.1 without a valid certificate (" in said


@pytest.mark.parametrize(
    ("change", "supported", "message"),
    [
        ({tls.KEY: ""}, True, "half set: JAX_MTLS_KEY_FILE is missing. Set JAX_MTLS_CERT_FILE"),
        ({}, False, r"this JAX takes none. Install jax>=0.11.2 .*or unset JAX_MTLS_CERT_FILE"),
        ({tls.AUTHORITY: os.devnull}, True, "the authority /dev/null cannot be used"),
    ],
)
def test_reports_certificates_that_cannot_be_used(variables, change, supported, message):
    with pytest.raises(ConfigError, match=message):
        PeerTls.read(variables | change, supported=supported)


def test_a_launch_leaves_no_key_behind(variables: dict[str, str]):
    key = Path(variables[tls.KEY])
    assert key.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    folder = key.parent.stat()
    assert folder.st_uid == os.getuid()
    assert not folder.st_mode & (stat.S_IRWXG | stat.S_IRWXO), "no other user reaches it"
    assert "memfd" in os.readlink(key), "it is in memory alone"


# Joins the coordination service of JAX without jtrain, as a stranger would.
STRANGER = """
import sys
import jax

jax.distributed.initialize(
    f"127.0.0.1:{sys.argv[1]}", 2, 1, initialization_timeout=10,
    coordinator_bind_address=f"127.0.0.1:{sys.argv[1]}",
)
print("joined", flush=True)
"""
# Process 0 of JAX alone, with a coordination service that waits for process 1.
SECOND = STRANGER.replace("timeout=10", "timeout=60")
FIRST = SECOND.replace("2, 1,", "2, 0,")


def start_python(code: str, *words: str, **environ: str) -> subprocess.Popen:
    env = plain_environ() | environ
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *words], env=env, **pipes)


@needs_tls
@pytest.mark.thorough
def test_jax_takes_only_processes_with_a_certificate():
    port = free_port()
    with throwaway_certificate({}) as given:
        first = start_python(FIRST, f"{port}", **given)
        stranger = start_python(STRANGER, f"{port}")
        try:
            said = stranger.communicate(timeout=400)[0]
            assert stranger.returncode != 0
            assert "joined" not in said
            assert first.poll() is None, "it still waits for process 1"
            second = start_python(SECOND, f"{port}", **given)
            assert "joined" in second.communicate(timeout=400)[0]
            assert "joined" in first.communicate(timeout=400)[0]
        finally:
            for process in (first, stranger):
                process.kill()
                process.communicate()
