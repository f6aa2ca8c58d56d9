"""Text drawn from a model that is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.models.generate import generate


def count_up(params, window):
    """Says surely that one more comes next; `params` is the size of the vocabulary."""
    del params
    return 100 * jax.nn.one_hot((window + 1) % 7, 7)


def by_window(params, window):
    """Says surely the first token of the window: tells which window a step saw."""
    del params
    return 100 * jax.nn.one_hot(jnp.broadcast_to(window[:, :1], window.shape), 7)


def loaded(params, window):
    return jnp.broadcast_to(params, (*window.shape, params.size))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 2, 12])
def test_goes_on_from_the_prompt_past_the_context(temperature, steps):
    prompt = jnp.array([[3, 4], [6, 0]])
    text = generate(
        count_up, 0, prompt, jax.random.key(0), steps=steps, context=5, temperature=temperature
    )
    expected = (np.array([[3], [6]]) + np.arange(2 + steps)) % 7
    np.testing.assert_array_equal(text, expected)


def test_sees_the_last_tokens_of_the_context():
    text = generate(by_window, 0, jnp.array([[1, 2, 3, 4]]), jax.random.key(0), steps=3, context=3)
    np.testing.assert_array_equal(text, [[1, 2, 3, 4, 2, 3, 4]])


def test_draws_as_often_as_the_chances_say():
    chances = jnp.array([0.5, 0.3, 0.2])
    draw = lambda temperature: np.bincount(
        np.asarray(
            generate(
                loaded,
                jnp.log(chances),
                jnp.zeros((40, 1), jnp.int32),
                jax.random.key(1),
                steps=50,
                context=4,
                temperature=temperature,
            )[:, 1:]
        ).ravel(),
        minlength=3,
    )
    # 2000 draws: 4 standard errors are 0.045.
    np.testing.assert_allclose(draw(1.0) / 2000, chances, atol=0.045)
    squared = chances**2 / (chances**2).sum()
    np.testing.assert_allclose(draw(0.5) / 2000, squared, atol=0.045)
    np.testing.assert_array_equal(draw(0.0), [2000, 0, 0])


def test_compiles_once_for_every_temperature_and_key():
    traces = []

    def counted(params, window):
        traces.append(None)
        return count_up(params, window)

    for seed, temperature in enumerate((0.5, 0.8, 1.0)):
        prompt = jnp.array([[seed]])
        generate(
            counted, 0, prompt, jax.random.key(seed), steps=4, context=3, temperature=temperature
        )
    assert len(traces) == 1
