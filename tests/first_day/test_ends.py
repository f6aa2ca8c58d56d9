"""Errors in a script, a notebook and a command: a few lines, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

from jtrain.errors import UserError
from jtrain.errors.user_code import check_takes, user_code

SCRIPT = """
import numpy as np
import jtrain as jt

x = np.ones((16, 4), np.float32)


def loss(params, batch, rng):
    return jt.Mean.of((batch["image"] @ params["w"]) ** 2, batch["mask"])


for wrong in ({"batch_size": 8, "verbos": 0}, {"loss": "mse"}):
    try:
        jt.fit(**{"loss": loss, "params": {"w": x[0]}, "data": x, "steps": 1} | wrong)
    except jt.errors.UserError as error:
        print(error)
jt.fit(loss, {"w": x[0]}, x, steps=3)
print("not here")
"""


def run(folder: Path, script: str, *options: str, **variables: str):
    path = folder / "train.py"
    path.write_text(script)
    env = plain_environ() | variables
    command = [sys.executable, "-W", "error", *options, str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


@pytest.mark.thorough
def test_a_script_ends_with_2_and_the_users_lines(tmp_path: Path):
    done = run(tmp_path, SCRIPT.replace("jt.errors", "__import__('jtrain.errors').errors"))
    assert done.returncode == 2, done.stderr
    assert "fit has no arguments batch_size=, verbos=. Did you mean batch=, quiet=?" in done.stdout
    assert "the loss is a function of (params, batch, rng), and this is a str" in done.stdout
    assert "jt.classifier(model)" in done.stdout
    assert "not here" not in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) <= 10, done.stderr
    shown = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert shown == [str(tmp_path / "train.py")] * 2
    assert lines[-1].startswith("Write 'x', or give the array that name")


@pytest.mark.thorough
def test_a_platform_that_is_not_there_is_named_with_the_line_to_type(tmp_path: Path):
    script = "import numpy as np, jtrain as jt\n"
    script += "jt.predict(lambda p, b: b['x'], {}, np.ones((8, 2), np.float32))\n"
    done = run(tmp_path, script, JAX_PLATFORMS="cuda")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "JAX_PLATFORMS=cuda asks for devices that JAX does not find here" in last
    assert "export JAX_PLATFORMS=cpu" in last
    assert "pip install 'jtrain[cuda13]'" in last
    assert len(done.stderr.splitlines()) <= 6, done.stderr


def wrong(batch):
    with user_code("the loss", batch):
        return batch["y"]


def test_a_notebook_shows_the_users_lines_and_the_message():
    with pytest.raises(UserError) as caught:
        wrong({"x": 1})
    shown = caught.value._render_traceback_()
    assert "Write 'x'" in shown[-1]
    assert "test_ends.py" in "".join(shown)
    assert "user_errors" not in "".join(shown)
    assert "CodeError: the loss asks for 'y', and `batch` has x" in "\n".join(shown)


def test_what_is_not_the_users_code_is_left_as_it_is():
    with pytest.raises(MemoryError), user_code("`build`"):
        raise MemoryError
    with pytest.raises(ConnectionError), user_code("`build`"):
        raise ConnectionError
    with pytest.raises(OSError, match="device") as disk, user_code("`build`"):
        raise OSError(5, "device error")
    assert not isinstance(disk.value, UserError)


def test_arguments_with_defaults_and_stars_fit():
    check_takes(lambda params, batch, rng=None: None, ("params", "batch", "rng"), "the loss")
    check_takes(lambda *args: None, ("params", "batch", "rng"), "the loss")
    check_takes(print, ("params", "batch", "rng"), "the loss")
    with pytest.raises(UserError, match=r"it takes \(params, batch, rng, scale\)"):
        check_takes(lambda params, batch, rng, scale: None, ("params", "batch", "rng"), "the loss")
    with pytest.raises(UserError, match=r"and this is a dict. Write: def init\(key\)"):
        check_takes({}, ("key",), "init")  # pyright: ignore[reportArgumentType]
