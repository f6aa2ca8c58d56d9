"""Names of earlier versions: every new path exists, and errors print the import to write."""

import importlib
import sys
from pathlib import Path

import pytest
from toy_study import write_study

from jtrain.config.resolve import resolve
from jtrain.errors import CodeError, ConfigError
from jtrain.errors.moved_names import MODULES, NAMES, new_path, rename_advice
from jtrain.errors.user_code import user_code

RENAMED = [
    (f"jtrain.{package}.{old}" if package else f"jtrain.{old}", new)
    for package, pairs in NAMES.items()
    for old, new in (pair.split(":") for pair in pairs.split())
]


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_every_renamed_module_is_named_today(old: str, new: str):
    assert new_path(f"jtrain.{old}") == f"jtrain.{new}"
    importlib.import_module(f"jtrain.{new}")


def test_every_renamed_name_is_found_in_the_package_of_today():
    missing = []
    for old, new in RENAMED:
        module, _, name = (new_path(old) or "").rpartition(".")
        if name != new or not hasattr(importlib.import_module(module), name):
            missing.append((old, new_path(old)))
    assert missing == []


STATEMENTS = {
    "from jtrain.values import values": "from jtrain import configclass as values",
    "from jtrain.types import Mean, Batch": (
        "from jtrain import Mean\n    from jtrain.core.types import Batch"
    ),
    "from jtrain.hooks import Evaluate, Signals": (
        "from jtrain.train.hooks import EvaluateEvery as Evaluate, Signals"
    ),
    "from jtrain.models.nnx import from_nnx": "from jtrain.models import from_nnx",
    "from jtrain.data.digits import Digits": "from jtrain.data.images.digits import Digits",
    "from jtrain.data import (\n    Arrays,\n    Labelled,\n)": (
        "from jtrain.data import Arrays, ImageDataset as Labelled"
    ),
    "import jtrain.precision as precision": "import jtrain.config.precision as precision",
    "from jtrain import loop": "from jtrain.core import loop",
}


@pytest.mark.parametrize("old", STATEMENTS)
def test_an_old_import_of_an_experiment_shows_the_new_one(old: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("experiments")]:
        monkeypatch.delitem(sys.modules, name)
    config = write_study(tmp_path)
    study = tmp_path / "experiments" / "toy.py"
    study.write_text(f"{old}\n{study.read_text()}")
    with pytest.raises(ConfigError) as error:
        resolve(config)
    new = STATEMENTS[old]
    assert str(error.value).endswith(f"Names of jtrain have moved. Write:\n    {new}")
    exec("\n".join(line.strip() for line in new.splitlines()), {})


def test_an_old_attribute_is_named_in_errors_of_user_code():
    import jtrain as jt

    with (
        pytest.raises(CodeError, match=r"jtrain\.optim\.Group is called jtrain\.optim\.ParamGroup"),
        user_code("`build`"),
    ):
        exec(compile("jt.optim.Group", "<string>", "exec"), {"jt": jt})


def test_other_errors_have_no_such_advice():
    with pytest.raises(ImportError) as error:
        exec("from jtrain.core.step import nothing")
    assert rename_advice(error.value) is None
    assert rename_advice(KeyError("jtrain.values")) is None
