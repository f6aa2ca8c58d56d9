"""`transformers` itself loads what jtrain exports, and gives the logits of jtrain.

Slow: `pip install transformers torch` and `-m slow`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import published_models as published
import pytest
from comparison import assert_close

from jtrain.core.pytree import named_leaves
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.models.pretrained.write import write_folder

MODELS = {
    "llama31": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModel",
    "vit": "AutoModelForImageClassification",
    "resnet": "AutoModelForImageClassification",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gives_the_logits_of_jtrain(name: str, tmp_path):
    how = "pip install transformers torch"
    torch = pytest.importorskip("torch", reason=how)
    transformers = pytest.importorskip("transformers", reason=how)
    golden = published.golden(name)
    source = PretrainedWeights(published.write_model(tmp_path / "in", golden))
    # Other weights than those of the folder, as training leaves them.
    arrays = {key: 1.1 * x + 0.01 for key, x in source.read(source.found).items()}
    write_folder(tmp_path / "out", source.family, source.model, arrays.__getitem__, base=source.hf)
    net = getattr(transformers, MODELS[name]).from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    model = source.model
    if "pixels" in golden:
        images = published.draw_pixels(tuple(golden["pixels"]))
        model = dataclasses.replace(model, image=(*images.shape[2:], images.shape[1]))
        theirs, ours = {"pixel_values": images}, images.transpose(0, 2, 3, 1)
    else:
        ours = np.array(golden["tokens"])
        theirs = {"input_ids": ours}
    with torch.no_grad():
        found = net.eval()(**{key: torch.from_numpy(x) for key, x in theirs.items()})
    want = (found.last_hidden_state if name == "bert" else found.logits).numpy()
    like = jax.eval_shape(model.build().init, jax.random.key(0))
    leaves = [arrays[("", "extra/")[i] + key] for i in (0, 1) for key in named_leaves(like[i])]
    params, extra = jax.tree.unflatten(jax.tree.structure(like), map(jnp.asarray, leaves))
    got, _ = jax.jit(model.build().apply)(params, extra, jnp.asarray(ours))
    assert np.abs(want).max() > 0.5
    print(name, np.abs(got - want).max() / np.abs(want).max())
    assert_close(got, want, 1e-5)  # sums in another order; the bar is 1e-4
