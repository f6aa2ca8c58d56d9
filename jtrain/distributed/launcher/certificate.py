"""Throw-away certificate of a launch, so that its processes take nobody else in.

One certificate is its own authority: who has the key belongs to the launch. It lies in memory of
the launcher, which its children of the same user reach by /proc, so that no file is left however
the launcher ends.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata

from jtrain.distributed.cluster import tls
from jtrain.distributed.launcher.port import LOOPBACK

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
    if tls.is_set(environ) or not takes_certificates(metadata.version("jax")):
        yield {}
        return
    pem = _make()
    if not pem:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        key, certificate = (stack.enter_context(_in_memory(text)) for text in pem)
        yield {tls.KEY: key, tls.CERTIFICATE: certificate, tls.AUTHORITY: certificate}


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
