"""The dial: a depth gives the shape of a transformer, and the steps, batch and rates of its run."""

import math
from pathlib import Path
from typing import Any

import pytest
from comparison import assert_close
from published_models import golden, write_model
from pydantic import ValidationError

from jtrain.config.dump import dump
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.models.depth import CHARACTERS, GPT2
from jtrain.models.transformer import Transformer

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = ("layers", "heads", "width")


def dialed(*settings: str, name: str = "speedrun"):
    return resolve(CONFIGS / f"{name}.yaml", settings)


def sizes(model: Transformer) -> list[int]:
    return [getattr(model, name) for name in SIZES]


@pytest.mark.parametrize(("depth", "aspect", "preset"), [(12, 64, "gpt2"), (32, 128, "llama2-7b")])
def test_depths_of_published_models_are_their_sizes(depth, aspect, preset):
    assert sizes(Transformer(depth=depth, aspect=aspect)) == sizes(Transformer(preset=preset))


def test_values_beside_the_depth_win_and_it_wins_over_a_preset():
    model = Transformer(preset="llama3-8b", depth=8, heads=4)
    assert sizes(model) == [8, 4, 512]
    assert (model.norm, model.vocab, model.groups, model.size_of_hidden) == ("rms", 128256, 4, 2048)


def test_a_run_at_the_reference_has_its_values():
    config = dialed("model.depth=12", "microbatches=1", name="gpt2").config
    assert config.batch * config.data.context == GPT2.batch
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (6e-4, 0.1)
    assert config.steps.amount == 10 * 12 * 12 * 768**2
    config = dialed("model.depth=4", "batch=12").config
    assert config.batch * config.data.context == CHARACTERS.batch
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-2, 0.1)


def test_rates_follow_the_size_and_the_batch_that_was_given():
    four, eight = dialed("model.depth=4").config, dialed("model.depth=8").config
    more = 8  # twice the layers and twice the width
    assert eight.steps.amount == more * four.steps.amount
    assert eight.batch == 2 ** round(math.log2(four.batch * more**0.383))
    root = math.sqrt(eight.batch / four.batch)
    assert_close(eight.optimizer.lr, four.optimizer.lr * root / math.sqrt(2), 1e-3)
    decay = four.optimizer.weight_decay * root / more
    assert_close(eight.optimizer.weight_decay, decay, 1e-3)
    wide = dialed("model.depth=4", f"batch={4 * four.batch}").config
    assert_close(wide.optimizer.lr, 2 * four.optimizer.lr, 1e-3)
    assert wide.steps == four.steps  # tokens, however many a step


def test_each_value_says_that_it_is_the_depths():
    found = dialed("model.depth=6", "optimizer.lr=0.5", "model.heads=3")
    keys = ("steps", "batch", "optimizer.weight_decay", "model.width", "optimizer.lr")
    said = [str(found.origins[key]) for key in keys]
    assert said == ["depth 6"] * 4 + ["command line"]
    assert (found.config.optimizer.lr, found.config.model.heads) == (0.5, 3)


def test_what_a_file_says_before_a_typed_depth_is_left_out_by_name():
    found = dialed("model.depth=8", "microbatches=16", name="gpt2")
    left = [note.split(" ")[0] for note in found.notes]
    assert left == ["steps", "batch", "optimizer.lr", "optimizer.weight_decay"]
    assert sizes(found.config.model) == [8, 8, 512]


def test_what_is_given_last_wins_the_preset_or_the_dial(tmp_path: Path):
    gpt2 = ["model.preset=gpt2", "steps=9", "batch=8", "optimizer.lr=1", "model.context=64"]
    found = dialed(*gpt2).config
    assert (sizes(found.model), found.model.depth, found.steps) == ([12, 12, 768], 0, 9)
    stored = tmp_path / "stored.yaml"
    stored.write_text(dump(dialed("model.depth=6").config))
    wide = resolve(stored, ["model.aspect=32"])
    assert (sizes(wide.config.model), wide.config.batch) == ([6, 6, 192], 32)
    assert [note.split(" ")[0] for note in wide.notes][:2] == ["model.width", "steps"]
    same = resolve(stored, ["seed=1"])
    assert (sizes(same.config.model), same.notes) == ([6, 6, 96], ())


def test_a_shape_has_one_source(tmp_path: Path):
    folder = str(write_model(tmp_path, golden("llama")))
    with pytest.raises(ValidationError, match="leave one of them out"):
        Transformer(depth=2, pretrained=folder)
    text: Any = "6"
    with pytest.raises(ValidationError, match="valid integer"):
        Transformer(depth=text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["model.depth=0"],
            ["steps: is missing", "batch: is missing", "lr: is missing", "aspect=16 is of depth"],
        ),
        (["model.depth=-1"], ["model.depth=-1: must be a whole number at least 0"]),
        (["model.depth=four"], ["model.depth=four: must be a whole number"]),
        (["model.depth=3", "model.aspect=5"], ["a head has 5: an odd number"]),
        (["optimizer.kind=sgd"], ["optimizer.lr: is missing"]),  # whose rates are others
        (["model.depth=4", "seed=-1"], ["seed=-1: must be"]),
        (["model.depth=999999999"], ["at most 1000"]),
        (["stages=[{until: 10, set: {model.depth: 2}}]"], ["model.depth holds for all of a run"]),
    ],
)
def test_a_mistake_beside_the_depth_is_the_only_one_named(settings, words):
    with pytest.raises(ConfigError) as caught:
        dialed(*settings)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(words)
    for word in words:
        assert any(word in line for line in lines)
