"""Experiments are found by name from where the config lies, and imported under that name."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from toy_study import CODE, write_study

from jtrain.config import lookup
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def as_it_was():
    before = {n: module for n, module in sys.modules.items() if n.startswith("experiments")}
    yield
    for name in [name for name in sys.modules if name.startswith("experiments")]:
        del sys.modules[name]
    sys.modules.update(before)


def test_experiments_import_one_another(tmp_path: Path):
    path = write_study(tmp_path)
    more = "from experiments.toy import Config as Toy\n"
    more += "from jtrain.config.configclass import configclass\n"
    (tmp_path / "experiments" / "more.py").write_text(
        f"{more}@configclass\nclass Config(Toy):\n    steps: int = 7\n"
    )
    path.write_text("experiment: more\nbatch: 4\noptimizer: {kind: adamw}\n")
    assert resolve(path).config.steps == 7


def test_a_directory_is_an_experiment_too(tmp_path: Path):
    path = write_study(tmp_path)
    (tmp_path / "experiments" / "toy.py").unlink()
    (tmp_path / "experiments" / "toy").mkdir()
    (tmp_path / "experiments" / "toy" / "__init__.py").write_text(CODE)
    resolved = resolve(path)
    assert resolved.schema.__module__ == "experiments.toy"
    assert sys.modules["experiments.toy"].Config is resolved.schema


@pytest.mark.parametrize("package", [False, True])
def test_the_nearest_directory_counts_and_not_the_path(tmp_path: Path, package: bool):
    far, near = write_study(tmp_path), tmp_path / "configs" / "deep"
    if package:
        (tmp_path / "experiments" / "__init__.py").write_text("")
    near.mkdir()
    inner = write_study(near)
    study = near / "experiments" / "toy.py"
    study.write_text(CODE.replace("width: int = Field(default=32", "width: int = Field(default=8"))
    settings = ["model.heads=8"]
    for _ in range(2):  # one after the other, and back again
        assert Path(sys.modules[resolve(far, settings).schema.__module__].__file__ or "") == (
            tmp_path / "experiments" / "toy.py"
        )
        assert Path(sys.modules[resolve(inner, settings).schema.__module__].__file__ or "") == study


def test_an_installed_package_offers_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "installed_studies.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # whose experiments are found too
    entries = [
        EntryPoint("far", "installed_studies", "jtrain.experiments"),
        EntryPoint("further", "installed_studies:Config", "jtrain.experiments"),
    ]
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: entries if group == "jtrain.experiments" else [],
    )
    for name in ("far", "further"):
        schema = lookup.load_experiment(lookup.find_experiment(name, tmp_path / "x.yaml"))
        assert schema.__module__ == "installed_studies"
    with pytest.raises(ConfigError, match=r"there is far, further; did you mean far\?"):
        lookup.find_experiment("farr", tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("code", "place", "what"),
    [
        ("x = 1\ndef f(:\n", "line 2", "SyntaxError"),
        ("def f():\n    return 1 / 0\nf()\n", "line 2, in f", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_broken_experiment_shows_where_it_broke(tmp_path: Path, code: str, place: str, what: str):
    path = write_study(tmp_path)
    study = tmp_path / "experiments" / "toy.py"
    study.write_text(code)
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    text = str(caught.value)
    assert f'File "{study}", {place}' in text
    assert what in text
    assert "importlib" not in text
    assert "jtrain/config" not in text
    study.write_text(CODE)
    assert resolve(path).config.steps == 10


def test_an_experiment_beside_the_config_wins_over_one_that_comes_with_jtrain(tmp_path: Path):
    path = write_study(tmp_path)
    (tmp_path / "experiments" / "toy.py").rename(tmp_path / "experiments" / "digits.py")
    path.write_text(path.read_text().replace("toy", "digits"))
    assert "optimizer" in resolve(path).schema.__pydantic_fields__
    assert sys.modules["experiments.digits"].__file__ == str(tmp_path / "experiments/digits.py")


@pytest.mark.parametrize("typed", ["digits", "digits.yaml", "configs/digits.yaml"])
def test_the_configs_that_come_with_jtrain_are_found_by_name(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolve(typed, ["steps=70"])
    assert (resolved.config.experiment, resolved.config.name) == ("digits", "digits")
    assert resolved.notes[0].startswith(f"{typed} is the config that comes with jtrain: /")
    with pytest.raises(ConfigError, match=r"no such file; did you mean digits, which comes with"):
        resolve("digts")
    (tmp_path / "digits").write_text("steps: many")
    with pytest.raises(ConfigError, match="digits:1: steps: must be a whole"):
        resolve("digits")
