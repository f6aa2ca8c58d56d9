"""Metadata server of a virtual machine of Google Cloud: attributes by HTTP."""

import http.client
import time
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from urllib.parse import quote

HOST = "metadata.google.internal"
# Host or address of another server: the first is of Google's own libraries (google/auth/
# environment_vars.py of google-auth), the second of JAX too.
VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
TIMEOUT = 2.0  # seconds for one answer; the server is on the machine's own host
ATTEMPTS = 3
PAUSE = 0.5  # seconds between two attempts
LONGEST = 1 << 20  # bytes of an answer


class NoAnswerError(Exception):
    """The metadata server gave no answer in time."""


class MetadataServer:
    """Attributes of this virtual machine."""

    def __init__(self, environ: Mapping[str, str]):
        """Choose the server; nothing is sent."""
        self.host = next(filter(None, map(environ.get, VARIABLES)), HOST)

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute; None if the machine has none of this name.

        Raises:
            NoAnswerError: if the server does not answer, after three attempts of two seconds each,
                or another program answers in its place.
        """
        why = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE if attempt else 0)
            try:
                status, answer = self._get(name)
            except (OSError, http.client.HTTPException) as error:
                why = f"{error or type(error).__name__}"
                continue
            if status == HTTPStatus.NOT_FOUND:
                return None
            if status == HTTPStatus.OK:
                return answer
            why = f"HTTP {status}"
            if status < HTTPStatus.INTERNAL_SERVER_ERROR:  # the same question has the same answer
                break
        raise NoAnswerError(f"its metadata server at {self.host} does not answer ({why})")

    def _get(self, name: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, timeout=TIMEOUT)  # by no proxy
        with closing(connection):
            path = f"/computeMetadata/v1/instance/attributes/{quote(name)}"
            connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            text, flavor = answer.read(LONGEST), answer.getheader("Metadata-Flavor")
        # Google's server says so in each answer, and google-auth checks the same
        # (google/auth/compute_engine/_metadata.py, `ping`).
        if answer.status == HTTPStatus.OK and flavor != "Google":
            raise http.client.HTTPException("another program answers")
        return answer.status, text.decode(errors="replace")
