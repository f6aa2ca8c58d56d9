"""Mutual TLS between the processes of a run, by the variables that JAX reads.

JAX encrypts its coordination service and asks each process for a certificate (from jax 0.11.2 on;
https://docs.jax.dev/en/latest/501/security.html). The processes of jtrain meet at the same port
before, so they take the same files.

A launch makes a throw-away certificate, so that its processes take nobody else in. It is its own
authority: who has the key belongs to the launch. It lies in memory of the launcher, which its
children of the same user reach by /proc, so that no file is left however the launcher ends.
"""

import contextlib
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from jtrain.distributed.cluster.cluster import LOOPBACK
from jtrain.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
FIRST = (0, 11, 2)  # version of JAX that takes certificates


def takes_certificates(version: str) -> bool:
    """Return whether a version of JAX takes certificates: `0.11.2` does."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= FIRST


class PeerTls(NamedTuple):
    """Certificate of this process, and the authority that signed those of its peers."""

    certificate: str
    key: str
    authority: str
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
        names = (CERTIFICATE, KEY, AUTHORITY)
        values = [environ.get(name, "") for name in names]
        if not any(values):
            return None
        if missing := [name for name, value in zip(names, values, strict=True) if not value]:
            raise ConfigError(
                f"certificates are half set: {' and '.join(missing)} is missing. Set "
                f"{CERTIFICATE}, {KEY} and {AUTHORITY}, or unset all three."
            )
        if not supported:
            raise ConfigError(
                f"{CERTIFICATE} asks for certificates between processes, and this JAX takes none. "
                f"Install jax>=0.11.2 (Python 3.12 or newer), or unset {', '.join(names)}."
            )
        found = cls(values[0], values[1], values[2], environ.get(PREFIX, ""))
        found._context(server=False)
        return found

    def wrap(self, peer: socket.socket, *, host: str = "") -> ssl.SSLSocket:
        """Return the encrypted connection to a peer that has a certificate.

        Args:
            peer: the connection, with its timeout.
            host: name of process 0, if this side connected to it.

        Raises:
            ssl.SSLError: if the peer has no valid certificate.
            ConfigError: if a file cannot be used.
        """
        wrapped = self._context(server=not host).wrap_socket(
            peer, server_side=not host, server_hostname=host or None
        )
        names = (wrapped.getpeercert() or {}).get("subjectAltName", ())
        uris = [str(value) for kind, value in names if kind == "URI"]
        if self.prefix and not any(uri.startswith(self.prefix) for uri in uris):
            wrapped.close()
            raise ssl.SSLError(f"no URI of the peer's certificate begins with {self.prefix}")
        return wrapped

    def _context(self, *, server: bool) -> ssl.SSLContext:
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


COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    # Ten years: longer than any launch.
    *("-nodes", "-keyout", "-", "-out", "-", "-days", "3650", "-subj", "/CN=jtrain launch"),
    *("-addext", f"subjectAltName=IP:{LOOPBACK},DNS:localhost"),
)


@contextlib.contextmanager
def throwaway_certificate(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables that give a certificate to all processes of a launch.

    None without `openssl`, with a JAX that takes no certificates, or where the environment has
    certificates already.
    """
    given = any(environ.get(name) for name in (CERTIFICATE, KEY, AUTHORITY))
    pem = ""
    if not given and takes_certificates(metadata.version("jax")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            pem = subprocess.run(COMMAND, capture_output=True, text=True, timeout=30).stdout
    if "PRIVATE KEY" not in pem or "CERTIFICATE" not in pem:
        yield {}
        return
    file = os.memfd_create("jtrain launch")  # the key and the certificate
    try:
        os.write(file, pem.encode())
        yield dict.fromkeys((KEY, CERTIFICATE, AUTHORITY), f"/proc/{os.getpid()}/fd/{file}")
    finally:
        os.close(file)
