"""Objects: files in an object store (`s3://`, `gs://` and the like), reached through fsspec.

An object appears whole by one request, and is replaced or removed by one; there is no renaming, no
locking and nothing to force to a disk.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jtrain.errors import FAULT, ConfigError, UserError

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")
_S3, _GCS = ("s3fs", "s3"), ("gcsfs", "gcs")  # a package, and the extra that has it
_EXTRAS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}


class ObjectStoreError(UserError):
    """An object store did not do what was asked."""

    code = FAULT


def is_address(text: object) -> bool:
    """Return whether a text is the address of an object store and no path of the disk."""
    return isinstance(text, str) and bool(_ADDRESS.match(text))


def check_on_disk(run: object, asked: str) -> None:
    """Raise ConfigError if a run is named by an address, where one on this disk is needed.

    Args:
        run: what was typed.
        asked: who needs it, for the message.
    """
    if is_address(run):
        raise ConfigError(
            f"{asked}: {run} is in an object store, and a run on this disk is needed. Fetch it, "
            f"and name what was fetched: jtrain ckpt fetch {run}"
        )


def check_local_path(text: object, what: str) -> None:
    """Raise ConfigError where only a path of this disk will do.

    Args:
        text: what was given.
        what: what it was given for, `--out`.
    """
    if is_address(text):
        raise ConfigError(
            f"{what} {text} is in an object store, and a path of this disk is needed. Name one, "
            f"and copy what lies there by the store's own tools (aws s3 cp, gcloud storage cp)."
        )


class ObjectStore:
    """The objects below one address, by their names: `checkpoints/3/seal.json`."""

    def __init__(self, address: str):
        """Raises ObjectsError if what reaches the store is not installed, or there is no such."""
        self.address = address.rstrip("/")
        self._scheme = address.partition("://")[0]
        with self._errors("to be reached"):
            fsspec = self._needed("fsspec")
            if self._scheme in _EXTRAS:
                self._needed(_EXTRAS[self._scheme][0])
            options: dict[str, Any] = {"use_listings_cache": False}
            if self._scheme in ("file", "local"):
                options = {"auto_mkdir": True}
            self._fs, self._root = fsspec.core.url_to_fs(self.address, **options)

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the bytes of each object by its name, of those below a folder."""
        place = f"{self._root}/{below}".rstrip("/")
        with self._errors("to be listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(place, detail=True)
            except FileNotFoundError:
                return {}
        prefix = len(self._root) + 1
        return {name[prefix:]: int(each["size"] or 0) for name, each in sorted(found.items())}

    def read(self, name: str, *, most: int = 1 << 28) -> bytes | None:
        """Return an object of at most `most` bytes; None if there is none."""
        with self._errors(f"to give {name}"):
            try:
                return self._fs.cat_file(f"{self._root}/{name}", start=0, end=most)
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Put an object in place of what has its name."""
        with self._errors(f"to take {name}"):
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def send(self, file: Path, name: str) -> None:
        """Put the content of a file in place of what has its name."""
        with self._errors(f"to take {name}"):
            self._fs.put_file(str(file), f"{self._root}/{name}")

    def fetch(self, name: str, file: Path) -> None:
        """Write an object to a file, whose folder is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(f"to give {name}"):
            self._fs.get_file(f"{self._root}/{name}", str(file))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after the other in this order; those that are gone are no matter."""
        for name in names:
            with self._errors(f"to remove {name}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        with self._errors("to be looked at"):
            self._fs.invalidate_cache()
            return self._fs.isfile(f"{self._root}/{name}")

    def version(self, name: str) -> str:
        """Return a text that is another when the object is; its ETag or checksum, mostly."""
        with self._errors(f"to tell of {name}"):
            return str(self._fs.ukey(f"{self._root}/{name}"))

    def matches(self, pattern: str) -> list[str]:
        """Return the names of the objects that a pattern names, `train/*.txt` say, sorted."""
        with self._errors("to be listed"):
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/{pattern}", detail=True)
        prefix = len(self._root) + 1
        return sorted(name[prefix:] for name, each in found.items() if each["type"] == "file")

    def _needed(self, module: str) -> Any:
        package, extra = _EXTRAS.get(self._scheme, ("fsspec", "s3"))
        try:
            return importlib.import_module(module)
        except ImportError:
            raise ObjectStoreError(
                f"{self.address} was asked for, which needs {package}, and that is not installed. "
                f"Install it: pip install 'jtrain[{extra}]'"
            ) from None

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Within, whatever a store's library raises becomes an ObjectsError in a line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ObjectStoreError(
                f"{self.address} was {what}, and the store refuses it ({text}). "
                f"{_todo(error, self._scheme)}"
            ) from None


def _todo(error: Exception, scheme: str) -> str:
    words = f"{type(error).__name__} {error}".lower()
    says: Callable[..., bool] = lambda *those: any(word in words for word in those)
    if says("protocol not known", "valueerror"):
        return "Write an address that begins with s3:// or gs://."
    if says("credential", "permission", "forbidden", "denied", "accesskey", "signature"):
        return (
            "Give this process the right to it: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a "
            "role; for gs://, gcloud auth application-default login."
        )
    if says("bucket", "no such file", "filenotfound"):
        return "Make the bucket, or name one that is there."
    if says("endpoint", "connect", "timed out", "timeout"):
        return "See whether the network and AWS_ENDPOINT_URL lead there."
    return f"See that {scheme}:// can be reached from here, and type the same again."
