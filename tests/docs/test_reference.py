"""The reference names what can be imported, and every public name is on one of its pages."""

import importlib
import re
from pathlib import Path

import pytest

import jtrain

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
NAMED = re.compile(r"^::: (jtrain[\w.]*)$", re.MULTILINE)


def exists(path: str) -> bool:
    """Return whether a dotted path is a module, or an attribute of one."""
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return bool(module) and hasattr(importlib.import_module(module), name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path):
    assert [path for path in NAMED.findall(page.read_text()) if not exists(path)] == []


def test_every_public_name_is_documented():
    named = {path for page in PAGES for path in NAMED.findall(page.read_text())}
    public = {f"jtrain.{name}" for name in jtrain.__all__ if not name.startswith("__")}
    assert public - named == set()
