"""Files of a run have the modes of the umask, secrets are private, and none leaves the run."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from plain_environ import run_python
from quick_study import at_home, trained, write_study

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.io.regular_files import atomic_write, check_no_links, create_new
from jtrain.server.process import FILE, announced
from jtrain.train.runtime import enable_compilation_cache


def modes(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory).as_posix(): stat.S_IMODE(path.lstat().st_mode)
        for path in (directory, *directory.rglob("*"))
        if not path.is_symlink()
    }


@pytest.mark.parametrize("umask", [0o022, pytest.param(0o007, marks=pytest.mark.thorough)])
def test_the_umask_decides_the_modes_of_a_run(umask: int, tmp_path: Path, monkeypatch, compiled):
    path = write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)
    before = os.umask(umask)
    try:
        trained(path, "steps=2", "name=small", "checkpoint.every=1")
        assert main(["report", "small"]) == 0
        assert main(["ckpt", "export", "small", "--out", "runs/weights/a.safetensors"]) == 0
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    found = modes(tmp_path / "runs")
    assert {"small/run.json", "small/report.html", "weights/a.safetensors"} <= found.keys()
    assert any(name.startswith("small/checkpoints/2/state/") for name in found)
    for name, mode in found.items():
        full = 0o777 if mode & 0o100 else 0o666
        assert mode == full & ~umask, f"{name}: {mode:o}"


@pytest.mark.thorough
def test_the_compile_cache_is_private_whatever_the_umask_is(tmp_path: Path):
    words = ["run", str(write_study(tmp_path)), "steps=2"]
    code = f"import os, sys; os.umask(0); from jtrain.cli import main; sys.exit(main({words!r}))"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    run_python("-c", code, cwd=tmp_path, env=env)
    cache = modes(tmp_path / "cache" / "jtrain")
    assert cache["."] == cache["compiled"] == 0o700
    assert len(cache) > 2


def test_secrets_are_private_whatever_the_umask_is(tmp_path: Path):
    before = os.umask(0)
    try:
        with announced(tmp_path, {"TOKEN": "secret"}):
            assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Return the usual compile cache, which does not exist yet, and its replacement."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    settings: Any = jax.config
    before = settings.jax_compilation_cache_dir
    yield (
        tmp_path / "home" / "jtrain" / "compiled",
        tmp_path / "tmp" / f"jtrain-{os.getuid()}" / "compiled",
    )
    jax.config.update("jax_compilation_cache_dir", before)


def chown_to_other(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, 12345)


def replace_by_link(path: Path) -> None:
    path.rmdir()
    path.symlink_to("/etc")


UNTRUSTED = {
    "made by another": lambda cache: chown_to_other(cache),
    "a program of another": lambda cache: chown_to_other(program_in(cache)),
    "a link as a program": lambda cache: (cache / "jit_step-1-cache").symlink_to("/etc/passwd"),
    "open to all": lambda cache: cache.chmod(0o777),
    "all open above": lambda cache: cache.parent.parent.chmod(0o777),
    "a program open to all": lambda cache: (program_in(cache).chmod(0o666), cache.chmod(0o755)),
    "a link to another's": replace_by_link,
}


def program_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "jit_step-0-cache").write_bytes(b"machine code")
    return folder / "jit_step-0-cache"


@pytest.mark.parametrize("how", UNTRUSTED)
def test_a_compile_cache_that_others_can_write_is_not_used(how, caches, caplog):
    usual, other = caches
    usual.mkdir(0o700, parents=True)
    usual.parent.chmod(0o700)
    UNTRUSTED[how](usual)
    assert enable_compilation_cache() == str(other)
    settings: Any = jax.config
    assert settings.jax_compilation_cache_dir == str(other)
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    said = caplog.text
    caplog.clear()
    assert "another user may have put programs into" in said
    assert f"{other} is used instead" in said
    assert f"mv {usual.parent} {usual.parent}.old" in said
    # The advice helps, unless the fault is above the path that it moves.
    usual.parent.rename(usual.parent.with_suffix(".old"))
    usual.parent.parent.chmod(0o755)
    assert enable_compilation_cache() == str(usual)
    assert caplog.text == ""


def test_without_a_private_directory_the_compile_cache_is_off(caches: tuple[Path, Path], caplog):
    for cache in caches:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    assert enable_compilation_cache() is None
    settings: Any = jax.config
    assert settings.jax_compilation_cache_dir is None
    assert "each run compiles again" in caplog.text


def test_a_compile_cache_of_the_user_becomes_private_silently(caches: tuple[Path, Path], caplog):
    usual, _ = caches
    usual.mkdir(parents=True, mode=0o755)
    program_in(usual)
    assert enable_compilation_cache() == str(usual)
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    program_in(usual).chmod(0o664)  # as with umask 002; nobody else may enter its folder
    assert enable_compilation_cache() == str(usual)
    assert caplog.text == ""


def test_a_written_file_follows_no_link(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run.json.new").symlink_to(other)
    atomic_write(tmp_path / "run.json", b"{}")
    assert (other.read_text(), (tmp_path / "run.json").read_text()) == ("mine", "{}")
    (tmp_path / "file").symlink_to(other)
    with create_new(tmp_path / "file") as file:
        file.write(b"new")
    assert (other.read_text(), (tmp_path / "file").read_bytes()) == ("mine", b"new")


def test_links_within_a_run_are_allowed_and_links_out_of_it_refused(tmp_path: Path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    check_no_links(tmp_path / "nothing")
    (run / "latest").symlink_to("checkpoints")
    check_no_links(run)
    (run / "checkpoints" / "4").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"4 is a link to .*Remove the link \(rm "):
        check_no_links(run)
