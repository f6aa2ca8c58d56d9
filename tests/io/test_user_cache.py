"""The user's cache directory, also of a user whom the system does not know."""

import os
import pwd
from pathlib import Path

import pytest

from jtrain.data.sources.known_sets import cache_dir
from jtrain.io.user_cache import user_cache_dir
from jtrain.train.compilation_cache import usual_directory


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Be a user without a name and without HOME, as in a container that runs as a number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_user_without_a_home_has_it_in_the_folder(nobody: Path):
    with pytest.raises(RuntimeError):
        Path.home()
    assert user_cache_dir() == nobody / ".cache"
    assert cache_dir() == nobody / ".cache/jtrain/data"
    assert usual_directory() == nobody / ".cache/jtrain/compiled"


def test_variables_name_it(nobody: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "HOME", "/home/me")
    assert user_cache_dir() == Path("/home/me/.cache")
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", "/caches")
    assert user_cache_dir() == Path("/caches")
