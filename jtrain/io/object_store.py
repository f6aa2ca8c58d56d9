"""Object stores: files at `s3://`, `gs://` and `az://`, reached through obstore.

One request creates, replaces or removes a complete object; there is no renaming, no locking and
nothing to flush to a disk. A request that fails for a moment is repeated by obstore.
"""

import configparser
import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from jtrain.errors import FAULT, ConfigError, UserError
from jtrain.io.redact import redact

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_NO_BUCKET = "NoSuchBucket"
RETRIES, RETRY_TIME = 8, timedelta(minutes=1)  # of a request
# The whole of a request is 30 seconds by default, in which no large object is read.
TIMEOUTS = {"timeout": timedelta(hours=6), "read_timeout": timedelta(minutes=1)}
PARTS = 9000  # of an object; S3 takes 10,000


class ObjectStoreError(UserError):
    """A request that an object store did not fulfil."""

    code = FAULT


def is_address(text: object) -> bool:
    """Return whether a text is the address of an object store, not a local path."""
    return isinstance(text, str) and bool(_ADDRESS.match(text))


def check_local_run(run: object, purpose: str) -> None:
    """Raise ConfigError if a run is given by an address where a local run is needed.

    Args:
        purpose: what needs the run, for the message.
    """
    if is_address(run):
        raise ConfigError(
            f"{purpose}: {run} is in an object store, and a local run is needed. Fetch the run, "
            f"and name the local copy: jtrain ckpt fetch {run}"
        )


def check_local_path(text: object, what: str) -> None:
    """Raise ConfigError unless `text` is a local path.

    Args:
        what: its use, such as `--out`.
    """
    if is_address(text):
        raise ConfigError(
            f"{what} {text} is in an object store, and a local path is needed. Name one, and copy "
            f"the files with the tools of the store (aws s3 cp, gcloud storage cp)."
        )


class ObjectStore:
    """Objects below one address, by their names: `checkpoints/3/seal.json`."""

    def __init__(self, address: str):
        """Raise ObjectStoreError if the package obstore is missing or the scheme unknown."""
        self.address = address.rstrip("/")
        self._scheme, _, rest = self.address.partition("://")
        with self._errors("connect"):
            try:
                from obstore import store
            except ImportError:
                extra = _EXTRAS.get(self._scheme, "s3")
                raise ObjectStoreError(
                    f"{self.address} needs the package obstore, which is not installed. Install "
                    f"it: pip install 'jtrain[{extra}]'"
                ) from None
            if self._scheme in ("file", "local"):
                self._store, self._root = store.LocalStore(), os.path.abspath(rest).strip("/")
                return
            bucket, _, self._root = rest.partition("/")
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
            client = {"allow_http": endpoint.startswith("http://"), **TIMEOUTS}
            retries = {"max_retries": RETRIES, "retry_timeout": RETRY_TIME}
            options: dict[str, Any] = {"client_options": client, "retry_config": retries}
            if self._scheme in ("s3", "s3a"):
                options |= _aws_profile()
            scheme = "gs" if self._scheme == "gcs" else self._scheme
            self._store: Any = store.from_url(f"{scheme}://{bucket}", **options)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of each object below a folder, by name."""
        with self._errors("list"):
            pages = self._store.list(self._path(below), chunk_size=1000)
            return self._names(meta for page in pages for meta in page)

    def matches(self, pattern: str) -> list[str]:
        """Return the sorted names of the objects that match a pattern, such as `train/*.txt`.

        `**/` stands for any number of folders.
        """
        if "/" in pattern or "**" in pattern:
            names = self.sizes()
        else:  # without the objects of the folders below
            with self._errors("list"):
                found = self._store.list_with_delimiter(self._path(""))
                names = self._names(found["objects"])
        return list(filter(_glob(pattern).fullmatch, names))

    def read(self, name: str, *, most: int = 1 << 28) -> bytes | None:
        """Return an object, or its first `most` bytes; None if there is none."""
        content = bytearray()
        with self._errors(f"read {name}"):
            try:
                for part in self._store.get(self._path(name)):
                    content += part
                    if len(content) >= most:
                        break
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return None
        return bytes(content[:most])

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        with self._errors(f"write {name}"):
            self._store.put(self._path(name), content)

    def send(self, file: Path, name: str) -> None:
        """Upload a file, creating or replacing an object."""
        with self._errors(f"write {name}"):
            part = max(1 << 23, file.stat().st_size // PARTS)
            self._store.put(self._path(name), file, chunk_size=part)

    def fetch(self, name: str, file: Path) -> None:
        """Download an object to a file, and create the folder of the file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"read {name}"), file.open("wb") as stream:
            stream.writelines(self._store.get(self._path(name)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects one after the other in this order; ignore missing ones."""
        for name in names:
            with self._errors(f"remove {name}"), contextlib.suppress(FileNotFoundError):
                self._store.delete(self._path(name))

    def exists(self, name: str) -> bool:
        """Return whether an object has this name."""
        with self._errors(f"check {name}"):
            try:
                self._store.head(self._path(name))
            except FileNotFoundError:
                return False
        return True

    def version(self, name: str) -> str:
        """Return a text that changes with the object, usually its ETag."""
        with self._errors(f"read the version of {name}"):
            meta = self._store.head(self._path(name))
        return meta["e_tag"] or f"{meta['last_modified']} {meta['size']}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".strip("/")

    def _names(self, metas: Iterable[Any]) -> dict[str, int]:
        """Return the sorted names below the address, and their sizes, without marks of folders."""
        prefix = len(self._root) + bool(self._root)
        sizes = {meta["path"][prefix:]: meta["size"] for meta in metas}
        folders = {folder for name in sizes for folder in _folders(name)}
        return {name: size for name, size in sorted(sizes.items()) if name and name not in folders}

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Convert whatever the library of the store raises into an ObjectStoreError of one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            text = str(error).partition("\n\nDebug source")[0]
            text = redact(" ".join(f"{type(error).__name__}: {text}".split()))
            raise ObjectStoreError(
                f"{self.address}: cannot {action}: the store raised {text[:400]}. "
                f"{_advice(text, self._scheme)}"
            ) from None


def _folders(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _glob(pattern: str) -> re.Pattern[str]:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    sets = (
        part.replace("[!", "[^") if part[:1] == "[" and part[-1:] == "]" else "" for part in parts
    )
    found = (wild.get(part) or of or re.escape(part) for part, of in zip(parts, sets, strict=True))
    return re.compile("".join(found))


def _aws_profile() -> dict[str, str]:
    """Return the keys and the region of the profile in ~/.aws, which obstore does not read.

    Variables of the environment come before the profile.
    """
    folder, profile = Path("~/.aws").expanduser(), os.environ.get("AWS_PROFILE", "default")
    files = configparser.ConfigParser(interpolation=None, default_section="")
    files.read(os.environ.get("AWS_CONFIG_FILE", folder / "config"))
    files.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"))
    sections = [files[name] for name in (f"profile {profile}", profile) if name in files]
    wanted = []
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        wanted += ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        wanted += ["region"]
    return {key: found[key] for found in sections for key in wanted if key in found}


_ADVICE = (
    (("unable to recognise url",), "Write an address that begins with s3://, gs:// or az://."),
    (("account must be specified",), "Set AZURE_STORAGE_ACCOUNT_NAME."),
    (("sending request", "timed out"), "Check the network and AWS_ENDPOINT_URL."),
    (("redirect",), "Set AWS_DEFAULT_REGION to the region of the bucket."),
    (
        # The last two are where a role is looked up.
        (
            *("credential", "permission", "forbidden", "denied", "accesskey", "signature"),
            *("unauthenticated", "169.254.", "metadata.google"),
        ),
        "Give this process access: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a "
        "role (eval $(aws configure export-credentials --format env)); for gs://, gcloud auth "
        "application-default login; for az://, AZURE_STORAGE_ACCOUNT_KEY.",
    ),
    (("bucket", "not found"), "Create the bucket, or name an existing one."),
)


def _advice(text: str, scheme: str) -> str:
    words = re.sub(r"(://[^/\s]+)/\S*", r"\1", text).lower()  # the names of objects say nothing
    for patterns, advice in _ADVICE:
        if any(pattern in words for pattern in patterns):
            return advice
    return f"Check that {scheme}:// can be reached from here, and repeat the command."
