"""Build hook: refuse a Python that jtrain does not support, before pip looks for its dependencies.

pip up to 25.0 reads Requires-Python last, so that on Python 3.10 it ends with a page of versions of
grain or tensorstore that it could not use.
"""

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RefuseOtherPythons(MetadataHookInterface):
    """Metadata hook that ends the installation with one sentence."""

    def update(self, metadata: dict) -> None:
        """Leave `metadata` as it is, or exit."""
        del metadata
        if sys.version_info < (3, 11):  # noqa: UP036 (pip of an older Python gets here first)
            found = ".".join(map(str, sys.version_info[:3]))
            sys.exit(
                f"jtrain needs Python 3.11 or newer, and this is Python {found}. "
                f"Make an environment with one: python3.12 -m venv .venv && "
                f"source .venv/bin/activate"
            )
