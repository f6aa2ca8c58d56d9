"""A file, a preset and what was typed become values, each with where it was said."""

import json
import os
import re
from pathlib import Path

import pytest
from plain_environ import run_python
from toy_study import write_study

from jtrain.config.dump import ABSENT, diff_configs, dump, flatten
from jtrain.config.messages import explain, json_schema
from jtrain.config.resolve import resolve
from jtrain.config.schema import field_schemas
from jtrain.config.top import BaseConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_study(tmp_path)


def beside(path: Path, name: str, text: str) -> Path:
    other = path.with_name(name)
    other.write_text(text)
    return other


def test_each_value_says_where_it_comes_from(path: Path):
    child = beside(path, "child.yaml", "base: toy.yaml\nbatch: 8\noptimizer:\n  lr: 3\n")
    resolved = resolve(child, ["model.width=128"])
    said = {key: str(origin) for key, origin in resolved.origins.items()}
    assert said["experiment"] == f"base {path}:1"
    assert said["optimizer.b1"] == f"base {path}:8"
    assert said["batch"] == f"{child}:2"
    assert said["optimizer.lr"] == f"{child}:4"
    assert said["model.width"] == "command line"
    assert said["seed"] == said["name"] == said["optimizer.schedule.warmup"] == "default"
    assert said.keys() == flatten(resolved.config).keys()
    config = resolved.config
    assert (config.batch, config.optimizer.lr, config.optimizer.b1) == (8, 3.0, 0.8)
    assert (config.model.width, config.name) == (128, "child")


def test_a_base_of_a_base_is_overridden_by_both(path: Path):
    beside(path, "middle.yaml", "base: toy.yaml\nsteps: 20\nbatch: 5\n")
    config = resolve(beside(path, "top.yaml", "base: middle.yaml\nsteps: 30\n")).config
    assert (config.steps, config.batch, config.checkpoint.every) == (30, 5, 5)


def test_a_new_kind_leaves_out_the_keys_of_the_old_and_says_so(path: Path):
    resolved = resolve(path, ["optimizer.kind=sgd", "optimizer.lr=1e-2"])
    assert (resolved.config.optimizer.kind, resolved.config.optimizer.lr) == ("sgd", 0.01)
    assert resolved.notes == (f"optimizer.b1 ({path}:8) is left out: sgd has no such key",)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [("guard.window=5", "window", 5), ("guard.without=[[120,130]]", "without", ((120, 130),))],
)
def test_a_key_of_the_kind_that_is_the_default_is_set_alone(path: Path, setting, key, value):
    resolved = resolve(path, [setting])
    assert resolved.config.guard.kind == "skip"
    assert getattr(resolved.config.guard, key) == value
    assert str(resolved.origins["guard.kind"]) == "default"


def test_saying_one_value_of_a_default_keeps_the_others(path: Path):
    config = resolve(path, ["model.heads=8", "optimizer.schedule.warmup=2"]).config
    assert (config.model.width, config.model.heads) == (64, 8)
    assert (config.optimizer.schedule.kind, config.optimizer.schedule.warmup) == ("cosine", 2)


def test_a_whole_mapping_that_is_typed_replaces_the_file_s(path: Path):
    resolved = resolve(path, ["optimizer={kind: adamw, lr: 2}"])
    assert (resolved.config.optimizer.lr, resolved.config.optimizer.b1) == (2.0, 0.9)
    assert str(resolved.origins["optimizer.lr"]) == "command line"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("1:30", "1:30"), ("2001-01-01", "2001-01-01"), ("'7'", "7"),
        ('"\\u00e9"', "é"),
    ],
)  # fmt: skip
def test_texts_are_texts(path: Path, text: str, value: str):
    assert resolve(path, [f"model.title={text}"]).config.model.title == value


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2", 2.0), (".5", 0.5), ("1E2", 100)])
def test_numbers_are_numbers(path: Path, text: str, value: float):
    assert resolve(path, [f"optimizer.lr={text}"]).config.optimizer.lr == value


def test_what_is_written_out_resolves_to_the_same_values(path: Path, tmp_path: Path):
    settings = [
        'model.title="a: b # \\t \\u2028 \\x7f \\U0001f600 no"',
        "model.layers=[3, 1]",
        "model.scales={a: 1e-7, 'b c': 1e22, 'null': 3}",
        "model.dropout=0.1",
        "optimizer.schedule.kind=constant",
    ]
    config = resolve(path, settings).config
    assert config.model.title.endswith("😀 no")
    text = dump(config, header="jtrain 1\n\nresolved")
    assert text.startswith("# jtrain 1\n#\n# resolved\nexperiment: toy\nname: toy\n")
    directory = tmp_path / "runs" / "first"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(text)
    again = resolve(directory / "config.yaml")
    assert again.config == config
    assert diff_configs(config, again.config) == []
    assert {origin.file for origin in again.origins.values()} == {str(directory / "config.yaml")}
    assert list(flatten(config))[:3] == ["experiment", "name", "seed"]


def test_differences_are_told_by_key(path: Path):
    before = resolve(path, ["model.layers=[1]"]).config
    after = resolve(path, ["steps=20", "optimizer.kind=sgd", "optimizer.lr=1e-3"]).config
    assert diff_configs(before, after) == [
        ("steps", 10, 20),
        ("optimizer.kind", "adamw", "sgd"),
        ("optimizer.b1", 0.8, ABSENT),
        ("optimizer.schedule.kind", "cosine", ABSENT),
        ("optimizer.schedule.warmup", 7, ABSENT),
        ("model.layers", [1], []),
        ("optimizer.momentum", ABSENT, 0.0),
    ]


def imported(code: str, **environment: str) -> list:
    """Return what a fresh interpreter printed last, as JSON."""
    done = run_python("-c", code, env={**os.environ, **environment})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("mistake", "needless"),
    [
        ("", ("jax", "pydantic", "ruamel")),
        ("stesp: 3\n", ("jax", "numpy", "optax")),
        pytest.param("experiment: nothing\n", ("jax", "numpy"), marks=pytest.mark.thorough),
    ],
)
def test_help_and_a_mistake_of_the_first_stage_are_told_without_jax(path, mistake, needless):
    path.write_text(mistake)
    words = ["show", str(path)] if mistake else ["--help"]
    seen = imported(
        "import json, sys; from jtrain.cli import main\n"
        f"code = main({words!r})\n"
        f"print(json.dumps([code, [m for m in {needless} if m in sys.modules]]))"
    )
    assert seen == [2 if mistake else 0, []]


@pytest.mark.thorough
def test_show_starts_no_backend_and_imports_nothing_heavy(path: Path):
    study = path.parent.parent / "experiments" / "toy.py"
    study.write_text("import jax\nimport jtrain.train.experiment\n" + study.read_text())
    seen = imported(
        "import json, sys; from jtrain.cli import main\n"
        f"code = main(['show', {str(path)!r}])\n"
        "heavy = [m for m in ('flax', 'orbax', 'grain') if m in sys.modules]\n"
        "print(json.dumps([code, heavy, 'jax' in sys.modules]))",
        JAX_PLATFORMS="none_that_could_start",
    )
    assert seen == [0, [], True]


@pytest.fixture
def schema(tmp_path: Path) -> type:
    return resolve(write_study(tmp_path)).schema


def test_a_key_of_several_kinds_is_explained_for_each(schema: type):
    assert explain(schema, "optimizer.lr") == (
        "optimizer.lr (sgd): a number above 0; required\n  Learning rate.\n"
        "optimizer.lr (adamw): a number above 0; default 0.001\n  Learning rate."
    )


def test_every_key_that_all_configs_have_has_a_docstring(schema: type):
    for name, want in field_schemas(BaseConfig).items():
        assert want.doc, name
        assert field_schemas(schema)[name].doc == want.doc
        for cls in want.classes():
            assert all(inner.doc for inner in field_schemas(cls).values()), cls


def test_the_json_schema_has_the_help_and_lets_a_file_inherit(schema: type):
    found = json.loads(json.dumps(json_schema(schema)))
    assert found["properties"]["seed"]["description"].startswith("Seed of everything random")
    number, duration = found["properties"]["steps"]["anyOf"]
    assert (number["type"], number["exclusiveMinimum"]) == ("integer", 0)
    assert all(re.search(duration["pattern"], said) for said in ("3 epochs", "2.5M tokens", "5%"))
    assert found["$defs"]["Sgd"]["properties"]["lr"]["description"] == "Learning rate."
    assert found["properties"]["base"]["type"] == "string"
    assert "required" not in found
    assert {"required": ["base"]} in found["anyOf"]
    assert found["additionalProperties"] is False


YAML = """experiment: language
steps: 10
batch: 4
optimizer: {kind: sgd, lr: 1}
data: {kind: tokens, path: x, context: 8}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return tmp_path / "study.yaml"


def resolved(study: Path, model: str, *settings: str):
    study.write_text(f"{YAML}model: {model}\n")
    return resolve(study, settings)


def test_values_said_with_a_preset_win_and_the_others_are_its_own(study: Path):
    found = resolved(study, "{preset: llama2-7b, width: 512}")
    model = found.config.model
    assert (model.width, model.layers, model.positions.kind) == (512, 32, "rotary")
    said = {key: str(origin) for key, origin in found.origins.items()}
    assert said["model.width"] == f"{study}:6"
    assert said["model.layers"] == said["model.positions.kind"] == "preset llama2-7b"
    assert said["model.remat"] == "default"
    assert found.notes == ()


def test_a_preset_that_is_typed_goes_over_the_file_and_says_so(study: Path):
    typed = "model.preset=llama2-7b", "model.positions.base=2"
    found = resolved(study, "{width: 512, layers: 32}", *typed)
    model = found.config.model
    assert (model.width, model.layers, model.positions.base) == (4096, 32, 2.0)
    left = f"model.width ({study}:6) is left out: preset llama2-7b was given after it"
    assert found.notes == (left,)


def test_another_kind_leaves_out_what_the_preset_said_of_its_own(study: Path):
    found = resolved(study, "{preset: llama2-7b}", "model.positions.kind=learned")
    assert (found.config.model.positions.kind, found.config.model.layers) == ("learned", 32)
    assert found.notes == ()


def test_what_was_resolved_resolves_to_itself_and_to_another_preset(study: Path):
    config = resolved(study, "{preset: llama2-7b, layers: 9}").config
    study.write_text(dump(config))
    assert resolve(study).config == config
    other = resolve(study, ["model.preset=gpt2"]).config.model
    assert (other.width, other.layers, other.positions.kind) == (768, 12, "learned")
