"""Causes of faults: a table of what each means and what to type.

A diagnosis measures, and names its cause with the numbers that it found: `cause("double sum",
what="loss", count=4, parts="devices")`. A cause with several forms has a row for each, as in
`empty slice` and `empty slice (step)`.
"""

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause with its explanation; `fault` is False if the cause is reported as no error."""

    name: str
    why: str
    fault: bool = True


UNSPLIT = 'or set rows_interact="batch" and never split the batch'
MEAN_OF = "`jt.Mean.of(values_by_row, batch['mask'])`"
ROW_KEYS = "`jt.row_keys(rng, batch)`"
FLOAT32_SUM = "`values.astype(jnp.float32).sum()`"
NO_FAULTS = {"one draw for the batch", "cancellation"}

PURITY = {
    "not a function": "called twice with the same arguments the loss gives two results: it draws "
    "from a source other than its key (a generator, the clock) or stores state between calls (a "
    "counter, a list). Draw from rng, and hold the state in `extra`.",
    "changes its arguments": "the loss changes its arguments: {changed}. The caller holds the same "
    "dict, so the next call gets the changed one. Make a new dict: `batch = {{**batch, 'x': x}}`.",
    "draws of the host": "the loss draws from {sources}: a number drawn during tracing is a "
    "constant of the compiled step, the same in each step and different on each process. Draw from "
    f"`rng` by jax.random, with {ROW_KEYS} for draws of each row.",
    "numbers of the host": "the loss computes with {asked}, another number on another process. "
    "Take the number of rows from the batch, `len(batch['mask'])`, and draws from `rng`.",
    "fixed number of rows": "the loss takes the {rows} rows of this batch and not {fewer} of them "
    "({raised}): a number of rows is written into it. A microbatch and a device have fewer rows. "
    "Take the number from the array, `x.shape[0]`, or let reshape infer it, `x.reshape(-1, ...)`.",
    "index out of range": "batch[{leaf!r}] holds {value} in row {row}, and the loss uses it to "
    "index {entries} entries, 0 .. {last}, of an array of shape {shape}. JAX raises no error: it "
    "reads another entry, or NaN, and trains on. Give integers in 0 .. {last}{shift}, make the "
    "array wider, or hide such rows by a weight of 0.",
}
MASKS = {
    "inverted mask": "{name} changes with the contents of hidden rows and not with the rows that "
    "count: the mask is inverted. A mask is true for rows that count; use it without `~`, and the "
    "values in `jnp.where(mask, values, 0)`.",
    "hidden rows": "the contents of hidden rows are counted in {name}: the mask is not applied to "
    f"all of its values. {MEAN_OF} masks values and weight.",
    "hidden rows in a statistic": "the contents of hidden rows change {name}, through a statistic "
    "over rows that includes them. Pass the mask to the layer that computes the statistic.",
    "padded size": "{name} changes with the number of hidden rows and not with their contents: it "
    "is divided by the size of an array, or depends on whether all rows are real. Count by the "
    f"mask: {MEAN_OF}.",
    "empty slice": "{name} is NaN for a slice without unmasked rows, 0/0: a small last batch "
    "leaves some devices without one, and the step is skipped on all devices. Divide by "
    "`jnp.maximum(count, 1)`, or return the sum and its weight undivided.",
    "constant in each slice": "the {which} of {name} is {constant:.6g} for a slice without "
    "unmasked rows: a constant (a penalty, an epsilon) is added once for each slice and device. "
    "Make it a term of its own, `loss + 0.1 * jt.Mean(penalty, jnp.float32(1))`, or multiply it by "
    "the count.",
}
ROWS = {
    "coefficient of rows": "the coefficient of term {index} of the loss is {whole:.6g} for all "
    "rows and {parts} for parts of them: it is computed from the rows. Make it independent of the "
    "batch, or a Mean of its own.",
    "custom derivative": "totals and weights add up and the gradient does not: a custom derivative "
    "(custom_vjp, custom_jvp) or a stop_gradient that depends on more than one row.",
    "custom derivative (scaled)": "the gradient of 4 times the loss is not 4 times its gradient: a "
    "custom derivative (custom_vjp) leaves out the cotangent, for one of its inputs at least. The "
    "step divides the loss by the weight of all rows, and such a gradient is not divided. Multiply "
    "the gradient of each input by the cotangent.",
    "position": "{name} changes with the order of the rows: it depends on the position of a row in "
    "the batch. Use the contents of the row, such as `batch['row']`.",
    "rows dropped": "{name} of {part} rows leaves out row {row}, and that of all {rows} rows does "
    "not: rows are taken in groups of a fixed size (`len(x) // 4 * 4`), and the others are "
    "dropped. Pad the last group and hide the padding, or take each row by itself.",
    "mean of means": "{name} has the weights {weights} for two halves and {whole} for both, and is "
    "divided by other numbers: it is a mean of the halves' own means, in which rows of the smaller "
    f"half count more. Return {MEAN_OF}: a sum over rows (or tokens) and its weight.",
    "sum as a mean": "the values of {name} for two halves add up to that of the whole, so it is a "
    "sum: {contract} the rows it was computed from, and its weight is the same for fewer rows, or "
    f"is not counted at all. Return the sum and the weight of its rows, {MEAN_OF}.",
    "number of rows": "{name} depends on how many rows the loss gets, and not on their contents: "
    "the size of the batch (len, shape) or the count of its mask enters it. Return a sum over rows "
    f"and its weight, {MEAN_OF}.",
}
NEIGHBOURS = {
    "rows are ranked": "{name} does not add up, because rows are ranked against the other rows of "
    f"the batch{{at}}: the selected rows depend on the split. Select within a row, {UNSPLIT}.",
    "rows mixed by a draw": "the value that a row adds depends on randomly drawn other rows{at}: "
    f"mixup, or negatives from the batch. Mix rows when the data is read, or within a row, "
    f"{UNSPLIT}.",
    "function of a sum": "{name} is a function of a sum over the rows of a slice{at}, and not a "
    "sum: the values of two halves do not give the value of the whole. {advice}",
    "branch on the batch": "{name} branches on a sum over the rows of a slice{at}: parts of a "
    "batch may take another branch than the whole. Decide for each row, or by a result of the "
    "previous step, held in `extra`.",
    "batch statistic": "the value or the weight that a row adds to {name} depends on other rows of "
    "the batch{at}, as in batch norm, a contrastive loss, or weights by how often a class occurs. "
    "Take the statistic within a row (layer norm, group norm), or from the whole data set, "
    f"{UNSPLIT}.",
}
DRAWS = {
    "key of the batch": "the draws of a row change with the order of the rows, their number or the "
    "numbers of other rows: the key is that of the whole batch or of a position in it, which a "
    f"split changes. Draw for each row by its key of {ROW_KEYS}, and use each key for its own row "
    "only.",
    "one draw for the batch": "a layer draws once for all its rows, by the key of the first row: "
    "the draws of a row depend on the layout. This is known of layers of other libraries; jtrain's "
    f"own layers draw by {ROW_KEYS}.",
}
NUMBERS = {
    "not finite": "{name} is not finite for the first batch: {operation}. Every step would be "
    "skipped, and there is nothing to compare. Keep the input of that operation inside its domain: "
    "`jnp.where` before the function, an epsilon under a root.",
    "not finite (inputs)": "{name} is not finite, because the parameters or the batch are not. "
    "Inspect the data: `jtrain data show CONFIG`.",
    "not finite (compiled)": "the compiled loss is not finite for the first batch, but it is "
    "finite when operations run one by one. Look for a product that is nearly too large.",
    "overflow": "{name} is infinite: {operation}, in {dtype}, which holds numbers up to {limit}. A "
    "part of the batch stays below this limit, so one layout takes the step and another skips it. "
    f"Sum in float32: {FLOAT32_SUM}.",
    "overflow (integers)": "{name} is summed over rows in {dtype} ({operation}), which overflows "
    "here or in a larger batch. Sum weights and counts as float32: "
    "`weights.astype(jnp.float32).sum()`.",
    "narrow sum": "{name} is summed over rows in {dtype} ({operation}), which holds numbers up to "
    "{limit}: it rounds differently with every split, and a large count stops growing. Sum in "
    f"float32: {FLOAT32_SUM}.",
    "rounding": "the result is right in float64; in its own types the loss is {loss:.1e} off and "
    "the gradient {gradient:.1e}, and rounding explains only {allowed:.1e}. Some operation rounds "
    "without need: a sum over microbatches or devices in 16 bits, a sum in a loop, a difference of "
    "large sums. Sum in float32, and centre first.",
    "cancellation": "the loss is {loss:.1e} off in float32 and right in float64: it is the small "
    "difference of large sums. Subtract in each row, before the sum: `jnp.sum((a - b) * mask)`, "
    "not `jnp.sum(a * mask) - jnp.sum(b * mask)`; for a variance centre first, `jnp.var`.",
}
STEPS = {
    "optimizer per part": "the optimizer is called {actual} times in a step and {expected} on one "
    "device: once for each {part}, before their gradients are summed. Moments, decay and clipping "
    "then act {actual} times. Sum first, then update once.",
    "empty slice (step)": "loss or gradient is not finite, so the step is skipped, and {part} "
    "{index} of {count} has nothing that counts: it divides by its own count of 0. Divide by the "
    "weight of all rows, after the sum over {parts}.",
    "not finite (step)": "loss or gradient is not finite with {count} {parts}, so the step is "
    "skipped, and one device takes it: a sum overflows in one of the two. `jtrain run CONFIG "
    "--find-nan` reports the operation.",
    "key of the part": "without random draws nothing differs: the key depends on the {part} "
    "(axis_index, or the number of a microbatch, folded in). Use the same key for all {parts} of a "
    f"step, and draw for each row by {ROW_KEYS}.",
    "positions": "the loss differs, and sequences are cut into {times} parts: each part counts "
    "positions from 0, for its causal mask, its rotary angles or a learned table. Add the offset "
    "of the part to the positions of queries and of keys.",
    "term by parts": "the loss is {off:.3g} off by term {index} of the loss, with {count} {parts}: "
    "the term is added once for each {part}, or divided by their number. A term is a Mean with its "
    "own weight, divided by the weight of all rows.",
    "mean of means (step)": "the {what} is the mean of the {count} {parts}' own means, in which "
    "rows of a smaller {part} count more. Sum totals and weights over all {parts}, then divide.",
    "double sum": "the {what} is {count} times that of one device, with {count} {parts}: a sum "
    "over them is summed again (a second psum), or the means of all {parts} are added.",
    "divided twice": "the {what} is 1/{count} of that of one device, with {count} {parts}: it is "
    "divided by their number after a sum that needs no division (pmean for psum).",
    "sum as a mean (step)": "the {what} is {weight:.6g} times that of one device, and {weight:.6g} "
    "is the weight of all rows: it is a sum, and nothing divides it. Divide it by the weight of "
    "all rows; a loss that is divided only for the log has a gradient that is not.",
    "clamped weight": "the {what} is {weight:.6g} times that of one device, and {weight:.6g} is "
    "the weight of all rows: a weight below 1 is clamped to 1 before it divides. Divide by the "
    "weight itself, and only where it is 0 by 1: `jnp.where(weight > 0, weight, 1)`.",
    "metric": "the {what} is {actual:.7g} and should be {expected:.7g}.",
    "missing sum": "the {what} is that of the {which} {part} alone: nothing is summed over {parts} "
    "(a psum is missing, or one overwrites the other).",
    "missing sum (backward)": "loss and gradient of {right} are right, and the gradient of {wrong} "
    "is not: between them the backward pass loses a sum over {parts}, or adds twice. The input of "
    "a layer that is split needs the sum of the gradients of all {parts}.",
    "padded size (step)": "the {what} is {times:.6g} = {real}/{rows} of that of one device, or its "
    "total divided by all {rows} rows: it is divided by all rows and not by those that count. "
    "Divide by the weight.",
    "loss scale": "the {what} is 2^{power} times the right one, for every split: the factor of a "
    "loss scale is multiplied in and not divided out.",
    "clip before the sum": "the gradient of the loss times 1e-6 is right, and that of the loss "
    "itself is not: an operation that depends on its size, such as clipping, acts on each {part} "
    "before they are summed. Sum first, then clip: in the optimizer.",
    "function before the sum": "the gradient of the loss times 1e-6 is not 1e-6 of its gradient: a "
    "nonlinear operation (a sign, a division by a norm, a cast to few bits) acts on each {part} "
    "before they are summed. Sum first; nonlinear operations belong in the optimizer.",
    "decay per part": "the gradient is right, and the parameters are off by {factor:.3g} times "
    "their old values: weight decay is applied again for each {part}. Let the optimizer apply it, "
    "once per step.",
    "update": "the gradient is right and the parameters after the step are not: the update.",
    "statistics of one part": "{leaf} is the value of the {which} {part} alone: running statistics "
    "of the others are lost. Sum them as Means.",
    "state": "loss and gradient are right, and {leaf} of the next state is not.",
    "unexplained": "the step differs from that of one device, with {count} {parts}, and no known "
    "explanation fits: compare the worst leaf.",
}
CAUSES = {**PURITY, **MASKS, **ROWS, **NEIGHBOURS, **DRAWS, **NUMBERS, **STEPS}


def cause(row: str, /, **facts: object) -> Cause:
    """Return the cause of a row of the table, with these facts in its sentences."""
    name = row.partition(" (")[0]
    return Cause(name, CAUSES[row].format(**facts), fault=name not in NO_FAULTS)
