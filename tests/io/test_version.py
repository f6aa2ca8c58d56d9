"""The version, of a source that is on the path and of an installed package."""

import os
import subprocess
import sys
from pathlib import Path

import jtrain as jt


def test_a_source_on_the_path_that_is_not_installed_has_a_version():
    script = (
        "import importlib.metadata as m\n"
        "m.version = lambda name: (_ for _ in ()).throw(m.PackageNotFoundError(name))\n"
        "import jtrain\nprint(jtrain.__version__)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(jt.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True
    )
    assert run.stdout == "0.0\n", run.stderr
