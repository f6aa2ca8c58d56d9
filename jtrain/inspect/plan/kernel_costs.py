"""Work of kernels in a compiled program: attention, and the products of a mixture of experts."""

import re
from collections.abc import Mapping

from jtrain.inspect.plan.hlo import (
    ArrayShape,
    HloProgram,
    Instruction,
    array_shapes,
    operand_shape,
)
from jtrain.train.flops import attention_products

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


def _operands(kernel: Instruction, scope: Mapping[str, Instruction]) -> list[ArrayShape]:
    return [operand_shape(kernel, index, scope) for index in range(len(kernel.operands))]


def _is_float(array: ArrayShape) -> bool:
    return array.kind.startswith(("bf", "f"))
