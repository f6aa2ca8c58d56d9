"""Work of one instruction of a compiled program: operations of products, and bytes moved."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrain.inspect.plan.hlo import (
    DEVICE,
    HOST,
    ArrayShape,
    HloProgram,
    Instruction,
    array_shapes,
    operand_shape,
)
from jtrain.train.flops import attention_products

# Instructions that move nothing: names for other values, and what holds other instructions.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("while", "conditional", "call", "after-all", "partition-id", "replica-id", "iota"),
    *("copy-done", "async-done", "async-update", "add-dependency", "domain"),
}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice", "scatter"}


class OpCost(NamedTuple):
    """Work of one execution on each device."""

    flops: float = 0.0  # of products
    memory: int = 0  # bytes between the device and its memory
    host: int = 0  # bytes between the device and its host
    fp8: float = 0.0  # of the operations, those of products of fp8


def op_cost(program: HloProgram, within: str, instruction: Instruction) -> OpCost:
    """Return the work of an instruction of the computation `within`.

    A fusion reads each input once and writes each output once. Of an input that it only slices, the
    slices count; of an output that it updates in place, the update. Arrays in the memory inside a
    TPU chip are free.
    """
    if instruction.operation in FREE or instruction.operation.endswith("-done"):
        return OpCost()
    memory, host = _bytes(program, within, instruction)
    fp8 = op_flops(program, within, instruction, fp8=True)
    return OpCost(op_flops(program, within, instruction), memory, host, fp8)


def op_flops(
    program: HloProgram, within: str, instruction: Instruction, *, fp8: bool = False
) -> float:
    """Return the multiplications and additions in the products of an instruction.

    Args:
        fp8: count products of fp8 alone.
    """
    scope = program.computations[within]
    if fp8 and instruction.operation in {"dot", "convolution", "custom-call"}:
        factors = _operands(instruction, scope)[:2]
        if not factors or not all(factor.kind.startswith("f8") for factor in factors):
            return 0.0
    if instruction.operation == "dot":
        return _dot_flops(instruction, scope)
    if instruction.operation == "convolution":
        return _convolution_flops(instruction, scope)
    if instruction.operation == "custom-call":
        return kernel_flops(instruction, scope) or 0.0
    if instruction.operation not in {"fusion", "call", "async-start"}:
        return 0.0
    called = [name for names in instruction.called.values() for name in names]
    return sum(
        op_flops(program, name, inner, fp8=fp8)
        for name in called
        for inner in program.computations[name].values()
    )


def _dot_flops(dot: Instruction, scope: Mapping[str, Instruction]) -> float:
    out, left = array_shapes(dot.shape)[0], operand_shape(dot, 0, scope)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
    return 2.0 * out.size * math.prod(left.dims[dim] for dim in dims)


def _convolution_flops(convolution: Instruction, scope: Mapping[str, Instruction]) -> float:
    """Return the operations of a convolution, without those with padding or between dilated values.

    The TPU compiler writes batched products as convolutions that are mostly padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return 0.0
    left, right = operand_shape(convolution, 0, scope), operand_shape(convolution, 1, scope)
    out = array_shapes(convolution.shape)[0]
    sizes = lambda text, shape: dict(zip(text, shape.dims, strict=True))
    inputs, kernel, output = sizes(labels[1], left), sizes(labels[2], right), sizes(labels[3], out)
    window = dict(re.findall(r"(\w+)=(\S+)", _window(convolution.attributes)))
    spatial = sorted(label for label in output if label.isdigit())
    pairs = math.prod(
        _valid_pairs(inputs[label], output[label], {k: v.split("x")[i] for k, v in window.items()})
        for i, label in enumerate(spatial)
    )
    # With `batch_group_count` the batch of the output is that of one group.
    return 2.0 * output["b"] * output["f"] * kernel["i"] * pairs


def _valid_pairs(size: int, out: int, window: Mapping[str, str]) -> int:
    """Return how many pairs of an output and a tap of the window meet a value of the input."""
    get = lambda name, default: int(window.get(name, default))
    low = int(window.get("pad", "0_0").split("_")[0])
    taps = np.arange(get("size", "1")) * get("rhs_dilate", "1")
    at = np.arange(out)[:, None] * get("stride", "1") + taps[None] - low
    dilation = get("lhs_dilate", "1")
    inside = (at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)
    return int(inside.sum())


def _window(attributes: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return found[1] if found else ""


def _bytes(program: HloProgram, within: str, instruction: Instruction) -> tuple[int, int]:
    """Return the bytes that an instruction moves to and from the device's and the host's memory."""
    scope, operation = program.computations[within], instruction.operation
    outputs = array_shapes(instruction.shape)
    if operation == "fusion":
        inputs = _operands(instruction, scope)
        moved = _read_inputs(program, instruction.called["calls"][0], inputs)
        moved += _fusion_outputs(program, instruction)
    elif operation == "copy-start":  # (target, source, context)
        moved = outputs[:2]
    elif operation == "async-start":
        moved = [out for out in outputs[-2:-1] for _ in (0, 1)]
    elif operation in SLICES:
        moved = outputs * 2
    elif operation in UPDATES:
        moved = [operand_shape(instruction, -1 if operation == "scatter" else 1, scope)] * 2
    else:
        moved = [*_operands(instruction, scope), *outputs]
    on_host = sum(array.num_bytes for array in moved if array.space == HOST)
    return sum(array.num_bytes for array in moved if array.space == DEVICE), on_host


def _fusion_outputs(program: HloProgram, fusion: Instruction) -> list[ArrayShape]:
    """Return the arrays that a fusion writes; of one that it updates in place, the update."""
    name = fusion.called["calls"][0]
    inside, root, written = program.computations[name], program.roots[name], []
    results = [inside[o] for o in root.operands] if root.operation == "tuple" else [root]
    for out, result in zip(array_shapes(fusion.shape), results, strict=False):
        source = _through(result, inside)
        if source.operation in UPDATES:
            update = operand_shape(source, -1 if source.operation == "scatter" else 1, inside)
            out = update._replace(space=out.space)
        written.append(out)
    return written


def _read_inputs(program: HloProgram, name: str, given: Sequence[ArrayShape]) -> list[ArrayShape]:
    """Return what a fused computation reads of its inputs."""
    inside, uses, moved = program.computations[name], _uses(program, name), []
    for each in inside.values():
        if each.operation == "parameter" and int(each.operands[0]) < len(given):
            moved += _read(program, inside, uses, each.name, given[int(each.operands[0])])
    return moved


def _uses(program: HloProgram, name: str) -> Mapping[str, list[Instruction]]:
    uses: dict[str, list[Instruction]] = {}
    for each in program.computations[name].values():
        for operand in dict.fromkeys(each.operands):
            uses.setdefault(operand, []).append(each)
    return uses


def _read(
    program: HloProgram,
    inside: Mapping[str, Instruction],
    uses: Mapping[str, Sequence[Instruction]],
    name: str,
    given: ArrayShape,
) -> list[ArrayShape]:
    """Return the parts of one input that a fused computation reads."""
    parts: list[ArrayShape] = []
    for use in uses.get(name, ()):
        if use.operation == "bitcast":
            parts += _read(program, inside, uses, use.name, given)
        elif use.operation in SLICES and use.operands[0] == name:
            parts.append(array_shapes(use.shape)[0]._replace(space=given.space))
        elif use.operation == "fusion":
            inner = use.called["calls"][0]
            unread = given._replace(dims=(0,))
            handed = [given if operand == name else unread for operand in use.operands]
            parts += _read_inputs(program, inner, handed)
        elif use.operation != "tuple" and (use.operation not in UPDATES or use.operands[0] != name):
            return [given]  # not passed on, nor updated in place
    return parts if sum(part.num_bytes for part in parts) < given.num_bytes else [given]


def _through(result: Instruction, inside: Mapping[str, Instruction]) -> Instruction:
    """Return the instruction behind bitcasts."""
    while result.operation == "bitcast" and result.operands[0] in inside:
        result = inside[result.operands[0]]
    return result


# Calls of a program that compute products: Pallas and XLA's own kernels, cuBLAS and cuDNN.
_KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla|__cublas|__cudnn)')
_RAGGED = "ragged-dot"  # the TPU compiler's kernel for jax.lax.ragged_dot


def kernel_flops(kernel: Instruction, scope: Mapping[str, Instruction]) -> float | None:
    """Return the multiplications and additions in the products of a kernel; None if not known."""
    floats = [x for x in _operands(kernel, scope) if _is_float(x)]
    outputs = [x for x in array_shapes(kernel.shape) if _is_float(x)]
    if not outputs:
        return 0.0
    if kernel.name.startswith(_RAGGED):
        return _ragged_flops(floats[-2], floats[-1], outputs[0])
    products = attention_products(f"{kernel.name} {kernel.attributes}")
    if products is None:
        return None
    q, k = [x for x in floats if len(x.dims) > 2][:2]
    return 2.0 * products * q.size * k.dims[-2]


def unknown_kernels(program: HloProgram) -> list[str]:
    """Return the names of the kernels whose products are not known, each once."""
    return sorted(
        {
            re.sub(r"\.\d+$", "", instruction.name)
            for scope in program.computations.values()
            for instruction in scope.values()
            if instruction.operation == "custom-call"
            and _KERNELS.search(instruction.attributes)
            and kernel_flops(instruction, scope) is None
        }
    )


def _ragged_flops(left: ArrayShape, right: ArrayShape, out: ArrayShape) -> float:
    """Return the operations if each row of `left` is in a group.

    Shapes: (m, k), (groups, k, n) -> (m, n), or for gradients (m, k), (m, n) -> (groups, k, n).
    """
    if len(right.dims) == 2:
        return 2.0 * left.dims[0] * out.dims[-2] * out.dims[-1]
    return 2.0 * out.size * left.dims[-1]


def _operands(instruction: Instruction, scope: Mapping[str, Instruction]) -> list[ArrayShape]:
    return [operand_shape(instruction, index, scope) for index in range(len(instruction.operands))]


def _is_float(array: ArrayShape) -> bool:
    return array.kind.startswith(("bf", "f"))
