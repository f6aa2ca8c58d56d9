"""A preset stands below the values said with it, and above those it was laid over."""

from pathlib import Path

import pytest
from toy_study import write_study

from jtrain.config.dump import dump
from jtrain.config.resolve import resolve

CODE = """
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jtrain.config.top import BaseConfig
from jtrain.config.configclass import configclass


@configclass
class Plain:
    kind: Literal["plain"] = "plain"


@configclass
class Turned:
    kind: Literal["turned"] = "turned"
    base: float = 10.0


@configclass
class Model:
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "small": {"width": 2, "depth": 3, "how": {"kind": "turned", "base": 5.0}},
        "large": {"width": 200, "depth": 30, "how": {"kind": "plain"}},
    }
    preset: Literal["none", "small", "large"] = "none"
    width: int = Field(default=8, gt=0)
    depth: int = 8
    limit: int | None = Field(default=None, gt=0)
    how: Annotated[Plain | Turned, Field(discriminator="kind")] = Plain()


@configclass
class Config(BaseConfig):
    model: Model = Model()
"""
YAML = "experiment: toy\nsteps: 10\nbatch: 4\ncheckpoint: {every: 5}\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_study(tmp_path)
    (tmp_path / "experiments" / "toy.py").write_text(CODE)
    return path


def resolved(path: Path, model: str, *settings: str):
    path.write_text(f"{YAML}model: {model}\n")
    return resolve(path, settings)


def test_values_said_with_it_win_and_the_others_are_its_own(path: Path):
    found = resolved(path, "{preset: small, width: 7}")
    model = found.config.model
    assert (model.width, model.depth, model.how.base) == (7, 3, 5.0)
    said = {key: str(origin) for key, origin in found.origins.items()}
    assert said["model.width"] == f"{path}:5"
    assert said["model.depth"] == said["model.how.base"] == "preset small"
    assert said["model.limit"] == "default"
    assert found.notes == ()


def test_one_that_is_typed_goes_over_the_file_and_says_so(path: Path):
    found = resolved(path, "{width: 7, depth: 3}", "model.preset=small", "model.how.base=2")
    model = found.config.model
    assert (model.width, model.depth, model.how.base) == (2, 3, 2.0)
    assert found.notes == (f"model.width ({path}:5) is left out: preset small was given after it",)


def test_another_kind_leaves_out_what_the_preset_said_of_its_own(path: Path):
    found = resolved(path, "{preset: small}", "model.how.kind=plain")
    assert (found.config.model.how.kind, found.config.model.depth) == ("plain", 3)
    assert found.notes == ()


def test_what_was_resolved_resolves_to_itself_and_to_another_preset(path: Path):
    config = resolved(path, "{preset: small, depth: 9}").config
    path.write_text(dump(config))
    assert resolve(path).config == config
    other = resolve(path, ["model.preset=large"]).config.model
    assert (other.width, other.depth, other.how.kind) == (200, 30, "plain")
