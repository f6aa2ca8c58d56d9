"""Object stores: files at `s3://`, `gs://` and the like, reached through fsspec.

One request creates, replaces or removes a complete object; there is no renaming, no locking and
nothing to flush to a disk.
"""

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import FAULT, ConfigError, UserError

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")
_S3, _GCS = ("s3fs", "s3"), ("gcsfs", "gcs")  # a package, and the extra that installs it
_EXTRAS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}


class ObjectStoreError(UserError):
    """A request that an object store did not fulfil."""

    code = FAULT


def is_address(text: object) -> bool:
    """Return whether a text is the address of an object store, not a local path."""
    return isinstance(text, str) and bool(_ADDRESS.match(text))


def check_local_run(run: object, purpose: str) -> None:
    """Raise ConfigError if a run is given by an address where a local run is needed.

    Args:
        run: what the user typed.
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
        text: the given path.
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
        """Raise ObjectStoreError if the package for the store is missing or the scheme unknown."""
        self.address = address.rstrip("/")
        self._scheme = address.partition("://")[0]
        with self._errors("connect"):
            fsspec = self._import("fsspec")
            if self._scheme in _EXTRAS:
                self._import(_EXTRAS[self._scheme][0])
            options: dict[str, Any] = {"use_listings_cache": False}
            if self._scheme in ("file", "local"):
                options = {"auto_mkdir": True}
            self._fs, self._root = fsspec.core.url_to_fs(self.address, **options)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of each object below a folder, by name."""
        place = f"{self._root}/{below}".rstrip("/")
        with self._errors("list"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(place, detail=True)
            except FileNotFoundError:
                return {}
        prefix = len(self._root) + 1
        return {name[prefix:]: int(each["size"] or 0) for name, each in sorted(found.items())}

    def read(self, name: str, *, most: int = 1 << 28) -> bytes | None:
        """Return an object of at most `most` bytes; None if there is none."""
        with self._errors(f"read {name}"):
            try:
                return self._fs.cat_file(f"{self._root}/{name}", start=0, end=most)
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        with self._errors(f"write {name}"):
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def send(self, file: Path, name: str) -> None:
        """Upload a file, creating or replacing an object."""
        with self._errors(f"write {name}"):
            self._fs.put_file(str(file), f"{self._root}/{name}")

    def fetch(self, name: str, file: Path) -> None:
        """Download an object to a file, and create the folder of the file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"read {name}"):
            self._fs.get_file(f"{self._root}/{name}", str(file))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects one after the other in this order; ignore missing ones."""
        for name in names:
            with self._errors(f"remove {name}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

    def exists(self, name: str) -> bool:
        """Return whether an object has this name."""
        with self._errors(f"check {name}"):
            self._fs.invalidate_cache()
            return self._fs.isfile(f"{self._root}/{name}")

    def version(self, name: str) -> str:
        """Return a text that changes with the object, usually its ETag or checksum."""
        with self._errors(f"read the version of {name}"):
            return str(self._fs.ukey(f"{self._root}/{name}"))

    def matches(self, pattern: str) -> list[str]:
        """Return the sorted names of the objects that match a pattern, such as `train/*.txt`."""
        with self._errors("list"):
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/{pattern}", detail=True)
        prefix = len(self._root) + 1
        return sorted(name[prefix:] for name, each in found.items() if each["type"] == "file")

    def _import(self, module: str) -> Any:
        package, extra = _EXTRAS.get(self._scheme, ("fsspec", "s3"))
        try:
            return importlib.import_module(module)
        except ImportError:
            raise ObjectStoreError(
                f"{self.address} needs {package}, which is not installed. Install it: "
                f"pip install 'jtrain[{extra}]'"
            ) from None

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Convert whatever the library of the store raises into an ObjectStoreError of one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ObjectStoreError(
                f"{self.address}: cannot {action}: the store raised {text}. "
                f"{_advice(error, self._scheme)}"
            ) from None


def _advice(error: Exception, scheme: str) -> str:
    words = f"{type(error).__name__} {error}".lower()

    def mentions(*patterns: str) -> bool:
        return any(pattern in words for pattern in patterns)

    if mentions("protocol not known", "valueerror"):
        return "Write an address that begins with s3:// or gs://."
    if mentions("credential", "permission", "forbidden", "denied", "accesskey", "signature"):
        return (
            "Give this process access: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a "
            "role; for gs://, gcloud auth application-default login."
        )
    if mentions("bucket", "no such file", "filenotfound"):
        return "Create the bucket, or name an existing one."
    if mentions("endpoint", "connect", "timed out", "timeout"):
        return "Check the network and AWS_ENDPOINT_URL."
    return f"Check that {scheme}:// can be reached from here, and repeat the command."
