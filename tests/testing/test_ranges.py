"""Out-of-range indices are reported with their row, and only if they change the loss."""

import numpy as np
import optax
from faults_of_programs import LATE, TOKENS, embedded, from_one, house_entropy, one_hot_labels
from planted import CLASSIFIER, classes, entropy, linear, nats

import jtrain as jt
from jtrain.core.mean import Mean
from jtrain.testing.ranges import find_counted_index
from jtrain.testing.trials import Trials


def find(loss, params, batch, **more):
    case = jt.testing.build_case(loss, params, batch, optimizer=optax.sgd(0.1), **more)
    return find_counted_index(case, Trials(case, double=False))


def test_the_message_has_row_range_and_shape():
    message = find(entropy, **LATE).cause.why
    assert (
        "batch['label'] holds 4 in row 6, and the loss uses it to index 4 entries, 0 .. 3"
        in message
    )
    assert "of an array of shape (8, 4). JAX" in message
    assert "`label - 1` where they count from 1" in message
    assert "holds 5 in row 5" in find(embedded, **TOKENS).cause.why
    message = find(from_one, linear(), classes(label=np.zeros(8, np.int32))).cause.why
    assert "holds 0 in row 0" in message


def test_hidden_rows_may_hold_anything():
    mask = np.arange(8) != 6
    assert find(house_entropy, linear(), LATE["batch"] | {"mask": mask}) is None


def test_more_batches_of_any_size_are_checked():
    good = CLASSIFIER["batch"]
    assert find(one_hot_labels, linear(), good) is None
    label = np.where(np.arange(19) == 17, 4, np.resize(good["label"], 19)).astype(np.int32)
    bad = classes(19, label=label)
    found = find(one_hot_labels, linear(), good, more_batches=lambda: iter([good, bad]))
    assert "in row 17" in found.cause.why


def test_an_index_with_weight_zero_is_accepted():
    def weighted(params, batch, rng):
        return Mean.of(nats(params, batch), batch["mask"] & (batch["label"] < 4))

    assert find(weighted, **LATE) is None
