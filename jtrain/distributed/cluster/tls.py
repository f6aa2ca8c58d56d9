"""Mutual TLS between the processes of a run, by the variables that JAX reads.

JAX encrypts its coordination service and asks each process for a certificate (from jax 0.11.2 on;
https://docs.jax.dev/en/latest/501/security.html). The processes of jtrain meet at the same port
before, so they take the same files.

A launch makes a throw-away certificate, so that its processes take nobody else in. It is its own
authority: who has the key belongs to the launch. It lies in memory of the launcher, which its
children of the same user reach by /proc, so that no file is left however the launcher ends.
"""

import contextlib
import dataclasses
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
PREFIX = "JAX_MTLS_PEER_URI_PREFIX"


@dataclasses.dataclass(frozen=True)
class PeerTls:
    """Certificate of this process, and the authority that signed those of its peers."""

    certificate: Path
    key: Path
    authority: Path
    prefix: str = ""
    """Beginning of a URI in each peer's certificate; empty: process 0 is known by its host name."""

    @classmethod
    def read(cls, environ: Mapping[str, str], *, supported: bool) -> "PeerTls | None":
        """Return the TLS that the environment asks for; None if it asks for none.

        Args:
            supported: whether JAX takes certificates.

        Raises:
            ConfigError: if a variable is missing, a file cannot be used, or JAX takes none.
        """
        values = {name: environ.get(name, "") for name in (CERTIFICATE, KEY, AUTHORITY)}
        if not any(values.values()):
            return None
        if missing := [name for name, value in values.items() if not value]:
            raise ConfigError(
                f"certificates are half set: {' and '.join(missing)} is missing. Set "
                f"{CERTIFICATE}, {KEY} and {AUTHORITY}, or unset all three."
            )
        if not supported:
            raise ConfigError(
                f"{CERTIFICATE} asks for certificates between processes, and this JAX takes none. "
                f"Install jax>=0.11.2 (Python 3.12 or newer), or unset {', '.join(values)}."
            )
        found = cls(
            Path(values[CERTIFICATE]),
            Path(values[KEY]),
            Path(values[AUTHORITY]),
            environ.get(PREFIX, ""),
        )
        found.context(server=False)
        return found

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of one side.

        Raises:
            ConfigError: if a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the certificate {self.certificate} with the key {self.key} and the authority "
                f"{self.authority} cannot be used ({error.strerror or error}). Set {CERTIFICATE}, "
                f"{KEY} and {AUTHORITY} to files in the PEM format, the key without a password."
            ) from None
        context.check_hostname = not server and not self.prefix
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def wrap(self, peer: socket.socket, *, host: str = "") -> ssl.SSLSocket:
        """Return the encrypted connection to a peer; only to process 0 it is begun here.

        Args:
            peer: the connection, with its timeout.
            host: name of process 0, if this side connected to it.

        Raises:
            ssl.SSLError: if process 0 has no valid certificate.
        """
        wrapped = self.context(server=not host).wrap_socket(
            peer,
            server_side=not host,
            server_hostname=host or None,
            do_handshake_on_connect=bool(host),
        )
        if host:
            self.check(wrapped)
        return wrapped

    def check(self, wrapped: ssl.SSLSocket) -> None:
        """Close the connection and raise SSLError if the peer's certificate is of others."""
        names = (wrapped.getpeercert() or {}).get("subjectAltName", ())
        uris = [str(value) for kind, value in names if kind == "URI"]
        if self.prefix and not any(uri.startswith(self.prefix) for uri in uris):
            wrapped.close()
            raise ssl.SSLError(f"no URI of the peer's certificate begins with {self.prefix}")


def is_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether any of the variables is set."""
    return any(environ.get(name) for name in (CERTIFICATE, KEY, AUTHORITY))


FIRST = (0, 11, 2)  # version of JAX that takes certificates
DAYS = 3650  # longer than any launch
COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-keyout", "-", "-out", "-", "-days", f"{DAYS}", "-subj", "/CN=jtrain launch"),
    *("-addext", f"subjectAltName=IP:{LOOPBACK},DNS:localhost"),
)


def takes_certificates(version: str) -> bool:
    """Return whether a version of JAX takes certificates: `0.11.2` does."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= FIRST


@contextlib.contextmanager
def throwaway_certificate(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables that give a certificate to all processes of a launch.

    None without `openssl`, with a JAX that takes no certificates, or where the environment has
    certificates already.
    """
    if is_set(environ) or not takes_certificates(metadata.version("jax")):
        yield {}
        return
    pem = _make()
    if not pem:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        key, certificate = (stack.enter_context(_in_memory(text)) for text in pem)
        yield {KEY: key, CERTIFICATE: certificate, AUTHORITY: certificate}


def _make() -> tuple[str, str] | None:
    """Return a new key and its certificate, in the PEM format; None if openssl makes none."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    key, certificate = (_block(name, done.stdout) for name in ("PRIVATE KEY", "CERTIFICATE"))
    return (key, certificate) if key and certificate else None


def _block(name: str, text: str) -> str:
    found = re.search(f"-----BEGIN {name}-----.*?-----END {name}-----\n", text, re.S)
    return found[0] if found else ""


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Yield the path of a file in memory, for this process and its children of the same user."""
    file = os.memfd_create("jtrain launch")
    try:
        os.write(file, text.encode())
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
