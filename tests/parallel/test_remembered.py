"""Cache of placed arrays from batch to batch, also with several threads."""

import jax.numpy as jnp
import numpy as np

from jtrain.parallel.strategies.strategy import PlacedBatchCache


def read_only(*values: int) -> np.ndarray:
    array = np.array(values)
    array.setflags(write=False)
    return array


def test_what_comes_again_is_put_once():
    puts = []
    place = PlacedBatchCache(
        lambda tree: puts.append(sorted(tree)) or {k: v for k, v in tree.items()}
    )
    mask = read_only(1, 1)
    for x in (np.zeros(2), np.ones(2)):
        batch = {"x": x, "mask": mask}
        assert {k: v is batch[k] for k, v in place(batch).items()} == {"x": True, "mask": True}
    assert puts == [["mask", "x"], ["x"]]


def test_a_batch_placed_in_the_middle_of_another_gives_each_its_own_mask():
    full, ragged = read_only(1, 1), read_only(1, 0)
    inside: list[dict] = []

    def put(tree):
        if "x" in tree and not inside:  # as another thread would
            inside.append(place({"mask": ragged}))
        return {name: jnp.asarray(array) for name, array in tree.items()}

    place = PlacedBatchCache(put)
    place({"mask": full})
    outside = place({"x": np.zeros(2), "mask": full})
    assert outside["mask"].tolist() == [1, 1]
    assert inside[0]["mask"].tolist() == [1, 0]
