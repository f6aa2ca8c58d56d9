"""Names of earlier versions: every new path exists, and errors print the import to write."""

import ast
import sys
from pathlib import Path

import pytest
from toy_study import write_study

from jtrain.config.resolve import resolve
from jtrain.errors import CodeError, ConfigError
from jtrain.errors.old_names import MODULES, NAMES, rename_advice
from jtrain.errors.user_code import user_code

ROOT = Path(__file__).parents[2]


def source(module: str) -> Path | None:
    stem = ROOT / module.replace(".", "/")
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((file for file in files if file.exists()), None)


def defined(module: str) -> set[str]:
    """Return the names that a module defines or re-exports, without importing it."""
    file = source(module)
    assert file, f"{module} does not exist"
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_every_new_module_exists():
    assert {new for new in MODULES.values() if source(new) is None} == set()


def test_no_old_module_exists():
    """Else the table would speak of a module that can be imported."""
    assert {old for old in MODULES if source(old) is not None} == set()


def test_every_new_name_exists():
    missing = set()
    for new in NAMES.values():
        module, _, name = new.rpartition(".")
        if name not in defined(module):
            missing.add(new)
    assert missing == set()


STATEMENTS = {
    "from jtrain.values import values": "from jtrain import configclass as values",
    "from jtrain.types import Mean, Batch": (
        "from jtrain import Mean\n    from jtrain.core.types import Batch"
    ),
    "from jtrain.hooks import Evaluate, Signals": (
        "from jtrain.train.hooks import EvaluateEvery as Evaluate, Signals"
    ),
    "from jtrain.models.nnx import from_nnx": "from jtrain.models.adapters.nnx import from_nnx",
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
