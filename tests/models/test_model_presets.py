"""Published names stand for the published sizes."""

import jax
import pytest

from jtrain.core.pytree import num_elements
from jtrain.models.presets.language import LANGUAGE_PRESETS
from jtrain.models.transformer import Transformer

# From the published configurations, biases and norms counted.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "mixtral-8x7b": 46_702_792_704,
}


def test_each_has_its_count_here():
    assert set(PARAMETERS) == set(LANGUAGE_PRESETS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_has_as_many_parameters_as_was_published(name: str):
    model = Transformer(preset=name, scan=True).build()  # one block is traced
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert num_elements(params) == PARAMETERS[name]


def test_a_written_out_model_has_as_many_as_a_stacked_one():
    params, _ = jax.eval_shape(Transformer(preset="gpt2").build().init, jax.random.key(0))
    assert num_elements(params) == PARAMETERS["gpt2"]


def test_all_that_makes_a_model_is_said_so_that_nothing_else_is_left_standing():
    free = {"kind", "preset", "pretrained", "dropout", "attention", "scan", "remat", "saved"}
    keys = set(Transformer.__pydantic_fields__) - free
    for name, values in LANGUAGE_PRESETS.items():
        assert set(values) == keys, name


def test_values_said_beside_it_win():
    model = Transformer(preset="llama3-8b", layers=2, tied=True)
    assert (model.layers, model.tied, model.width, model.kv_heads) == (2, True, 4096, 8)
    assert model.positions.base == 500000.0


def test_an_unknown_one_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no preset 'llama3_8b', only gpt2.*preset=llama3-8b\?"):
        Transformer(preset="llama3_8b")
    assert Transformer(preset="llama3-8b").layers == 32
