"""Every key has help: its docstring, what is allowed, its default."""

import json
import re
from pathlib import Path

import pytest
from toy_study import write_study

from jtrain.config.messages import explain, json_schema
from jtrain.config.resolve import resolve
from jtrain.config.schema import field_schemas
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError


@pytest.fixture
def schema(tmp_path: Path) -> type:
    return resolve(write_study(tmp_path)).schema


def test_a_key_of_several_kinds_is_explained_for_each(schema: type):
    assert explain(schema, "optimizer.lr") == (
        "optimizer.lr (sgd): a number above 0; required\n  Learning rate.\n"
        "optimizer.lr (adamw): a number above 0; default 0.001\n  Learning rate."
    )


def test_help_goes_through_kinds(schema: type):
    text = explain(schema, "optimizer.schedule.warmup")
    assert text.startswith("optimizer.schedule.warmup (adamw cosine): a whole number at least 0; ")
    assert "sgd: Plain steps downhill." in explain(schema, "optimizer")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.size", "a whole number or auto; default auto"),
        ("model.layers", "a list, of each a whole number; default []"),
        ("steps", "a whole number above 0; required"),
    ],
)
def test_what_is_allowed_is_said_in_words(schema: type, key: str, words: str):
    assert explain(schema, key).startswith(f"{key}: {words}")


def test_an_unknown_key_names_the_nearest(schema: type):
    with pytest.raises(ConfigError, match=r"it has kind, lr, .* did you mean lr\?"):
        explain(schema, "optimizer.lrr")
    with pytest.raises(ConfigError, match=r"steps\.x: x is no key of steps; it is a whole number"):
        explain(schema, "steps.x")


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
