"""What a run writes is its user's alone, and lands in the run's directory."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from quick_study import write_study

from jtrain.cache import keep_compiled_programs
from jtrain.errors import ConfigError
from jtrain.hooks.rewrite import rewrite
from jtrain.private import UMASK, created, private_files, refuse_links


def modes(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory).as_posix(): stat.S_IMODE(path.lstat().st_mode)
        for path in (directory, *directory.rglob("*"))
        if not path.is_symlink()
    }


def trained(where: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run of two steps in `where`/runs/small, by a user whose umask hides nothing."""
    words = ["run", str(write_study(where)), "steps=2", "name=small", "checkpoint.every=1"]
    code = f"import os, sys; os.umask(0); from jtrain.cli import main; sys.exit(main({words!r}))"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    env["XDG_CACHE_HOME"] = str(where / "cache")
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=where,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_and_its_compile_cache_are_of_one_user_alone(tmp_path: Path):
    done = trained(tmp_path)
    assert done.returncode == 0, done.stderr
    run = modes(tmp_path / "runs" / "small")
    assert {"config.yaml", "run.json", "metrics.jsonl", "log.txt"} <= run.keys()
    assert any(name.startswith("checkpoints/2/state/") for name in run)
    cache = modes(tmp_path / "cache" / "jtrain" / "compiled")
    assert len(cache) > 1
    assert modes(tmp_path / "runs")["."] == 0o700
    for name, mode in {**run, **cache}.items():
        assert mode & 0o077 == 0, f"{name}: {mode:o}"


def test_the_mask_is_given_back_and_may_be_another(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(UMASK, raising=False)
    before = os.umask(0o022)
    try:
        for said, mode in {"": 0o600, "027": 0o640, "077": 0o600, "0": 0o666}.items():
            monkeypatch.setenv(UMASK, said)
            with private_files():
                path = tmp_path / f"file{said}"
                path.write_text("x")
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert os.umask(0o022) == 0o022
        for said in ("abc", "777", "-1", "0o77x", "100"):
            monkeypatch.setenv(UMASK, said)
            with pytest.raises(ConfigError, match=f"{UMASK}=.*Set {UMASK}=027"), private_files():
                raise AssertionError("it was entered")
    finally:
        os.umask(before)


def test_the_cache_that_was_open_to_others_is_closed(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings: Any = jax.config
    before = settings.jax_compilation_cache_dir
    try:
        open_to_all = tmp_path / "jtrain" / "compiled"
        open_to_all.mkdir(parents=True)
        open_to_all.chmod(0o777)
        assert keep_compiled_programs() == open_to_all
        assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o700
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_file_that_is_written_follows_no_link(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run.json.new").symlink_to(other)
    rewrite(tmp_path / "run.json", b"{}")
    assert (other.read_text(), (tmp_path / "run.json").read_text()) == ("mine", "{}")
    (tmp_path / "file").symlink_to(other)
    with created(tmp_path / "file") as file:
        file.write(b"new")
    assert (other.read_text(), (tmp_path / "file").read_bytes()) == ("mine", b"new")


def test_links_within_a_run_are_no_matter_and_those_out_of_it_are_told(tmp_path: Path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    refuse_links(tmp_path / "nothing")
    (run / "latest").symlink_to("checkpoints")
    refuse_links(run)
    (run / "checkpoints" / "4").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"4 is a link to .*Remove the link \(rm "):
        refuse_links(run)
