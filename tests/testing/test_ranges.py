"""Integers that choose nothing are told with their row, and only where the loss counts them."""

import numpy as np
import optax
from faults_of_programs import LATE, TOKENS, embedded, from_one, house_entropy, one_hot_labels
from planted import CLASSIFIER, classes, entropy, linear, nats

import jtrain as jt
from jtrain.core.mean import Mean
from jtrain.testing.ranges import out_of_range
from jtrain.testing.trials import Trials


def checked(loss, params, batch, **more):
    of = jt.testing.subject(loss, params, batch, optimizer=optax.sgd(0.1), **more)
    return out_of_range(of, Trials(of, double=False))


def test_the_row_the_range_and_the_shape_are_told():
    said = checked(entropy, **LATE).cause.why
    assert "batch['label'] holds 4 in row 6, and the loss chooses one of 4 entries, 0 .. 3" in said
    assert "of an array of shape (8, 4) by it" in said
    assert "`label - 1` where they count from 1" in said
    assert "holds 5 in row 5" in checked(embedded, **TOKENS).cause.why
    said = checked(from_one, linear(), classes(label=np.zeros(8, np.int32))).cause.why
    assert "holds 0 in row 0" in said


def test_hidden_rows_may_hold_anything():
    mask = np.arange(8) != 6
    assert checked(house_entropy, linear(), LATE["batch"] | {"mask": mask}) is None


def test_further_batches_of_any_size_are_looked_at():
    good = CLASSIFIER["batch"]
    assert checked(one_hot_labels, linear(), good) is None
    label = np.where(np.arange(19) == 17, 4, np.resize(good["label"], 19)).astype(np.int32)
    bad = classes(19, label=label)
    caught = checked(one_hot_labels, linear(), good, further=lambda: iter([good, bad]))
    assert "in row 17" in caught.cause.why


def test_a_number_that_a_weight_knows_of_is_no_fault():
    def known(params, batch, rng):
        return Mean.of(nats(params, batch), batch["mask"] & (batch["label"] < 4))

    assert checked(known, **LATE) is None
