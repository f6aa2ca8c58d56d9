"""Memory of a device by name: parts of the state, and the arrays at the peak."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.core.pytree import named_leaves
from jtrain.inspect.plan.hlo import HloProgram, Instruction, array_shapes
from jtrain.parallel.offload import is_on_host
from jtrain.train.program import Program

_PARTS = {"params": "parameters", "opt_state": "optimizer"}
_ORDER = ("parameters", "frozen", "optimizer", "other")
_FROZEN = "extra/base/"


class StatePart(NamedTuple):
    """Leaves of a state that belong together."""

    name: str  # parameters, frozen, optimizer or other
    kind: str  # type of frozen leaves: float32, bfloat16, int8 or nf4
    host: bool  # in the memory of the host between steps
    bytes: int  # of each device

    @property
    def note(self) -> str:
        """Type and place of the part, in words."""
        kind = f"in {self.kind}" if self.kind else ""
        return ", ".join(filter(None, [kind, "in host memory" if self.host else ""]))


def state_parts(program: Program) -> tuple[StatePart, ...]:
    """Return the parts of a setup's state that have leaves, from shapes alone."""
    sums: dict[tuple[str, str, bool], int] = {}
    for name, leaf in named_leaves(program.resolved.abstract_state).items():
        key = (*_part(name, leaf, program), is_on_host(leaf))
        shape = leaf.sharding.shard_shape(leaf.shape)
        sums[key] = sums.get(key, 0) + math.prod(shape) * leaf.dtype.itemsize
    parts = [StatePart(*key, size) for key, size in sums.items()]
    return tuple(sorted(parts, key=lambda part: (_ORDER.index(part.name), -part.bytes)))


def _part(name: str, leaf: Any, program: Program) -> tuple[str, str]:
    adapter = program.resolved.experiment.adapter
    if adapter is None or not name.startswith(_FROZEN):
        return _PARTS.get(name.split("/")[0], "other"), ""
    owner, kind = name.removeprefix(_FROZEN).rsplit("/", 1)[0], adapter.settings.frozen
    stored = kind in ("int8", "nf4") and owner in adapter.leaves  # codes and scales of one leaf
    return "frozen", kind if stored else str(leaf.dtype)


_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.M)
_WRAPPERS = re.compile(
    r"^(jit\([^()]*\)|jvp\(.*\)|transpose\(.*\)|while|body|eval_jaxpr|checkpoint)$"
)
_ROLES = {"params": "parameter", "opt_state": "optimizer state", "extra": "state"}


PASSED = {"get-tuple-element", "copy", "bitcast", "copy-done", "copy-start", "async-done"}


class Tensor(NamedTuple):
    """An array in memory at the peak of a step."""

    bytes: int
    role: str  # parameter, optimizer state, state, batch, forward, backward or update
    name: str  # path of the leaf, or the operation that makes the array
    shape: str  # on a device
    source: str = ""  # file and line that make it
    arrays: int = 1  # arrays alike


class Frames:
    """Source lines of a program's instructions, from the tables at the head of its text."""

    def __init__(self, text: str):
        tables = {name: dict(_rows(rows)) for name, rows in _TABLE.findall(text[:400_000])}
        self._files = tables.get("FileNames", {})
        self._locations = tables.get("FileLocations", {})
        self._frames = tables.get("StackFrames", {})

    def line(self, frame: str) -> str:
        """Return `package/file.py:12` of a stack frame; empty if it is not known."""
        location = self._locations.get(_field(self._frames.get(frame, ""), "file_location_id"), "")
        file = self._files.get(_field(location, "file_name_id"), "").strip('"')
        if not file:
            return ""
        return f"{'/'.join(file.split('/')[-2:])}:{_field(location, 'line')}"


def name_tensors(
    program: HloProgram, text: str, buffers: Sequence[tuple[str, str, int]]
) -> tuple[Tensor, ...]:
    """Return the arrays of `buffers` by name, arrays alike together, largest first.

    Args:
        text: the program's, for the tables of its source lines.
        buffers: as `CompiledStep` has them.
    """
    frames, made = Frames(text), {}
    for within, scope in program.computations.items():
        for each in scope.values():
            made.setdefault(each.name, (each, within))
    callers = _callers(program)
    found: dict[tuple, Tensor] = {}
    for name, element, size in buffers:
        if name not in made:
            continue
        tensor = _tensor(program, callers, frames, *made[name], element, size)
        same = found.get(tensor[1:5])
        if same is not None:
            tensor = tensor._replace(bytes=same.bytes + size, arrays=same.arrays + 1)
        found[tensor[1:5]] = tensor
    return tuple(sorted(found.values(), key=lambda each: -each.bytes))


def _callers(program: HloProgram) -> dict[str, tuple[Instruction, str]]:
    """Return for each computation an instruction that calls it, and where that instruction is."""
    return {
        called: (each, within)
        for within, scope in program.computations.items()
        for each in scope.values()
        for names in each.called.values()
        for called in names
    }


def _tensor(
    program: HloProgram,
    callers: Mapping[str, tuple[Instruction, str]],
    frames: Frames,
    each: Instruction,
    within: str,
    element: str,
    size: int,
) -> Tensor:
    shapes = array_shapes(each.shape)
    at = int(element.split(",")[0]) if element else 0
    shape = shapes[at] if at < len(shapes) else None
    text = f"{shape.kind}[{','.join(map(str, shape.dims))}]" if shape else ""
    maker = _maker(program, callers, each, within, at)
    stack = maker.quoted("op_name")
    if maker.operation == "parameter" and stack.startswith(("state.", "batch")):
        role, path = _leaf(stack)
        return Tensor(size, role if maker is each else f"copy of {role}", path, text)
    backward, forward = "transpose(" in stack, "jvp(" in stack
    role = "backward" if backward else "forward" if forward else "update"
    source = frames.line(str(maker.number("stack_frame_id")))
    return Tensor(size, role, _short(stack) or each.name, text, source)


def _maker(
    program: HloProgram,
    callers: Mapping[str, tuple[Instruction, str]],
    each: Instruction,
    within: str,
    element: int,
) -> Instruction:
    """Return the instruction that computes a value: behind loops, calls, tuples and copies."""
    for _ in range(16):
        scope = program.computations[within]
        if each.operation == "parameter" and within in callers:
            shapes, (caller, outside) = array_shapes(each.shape), callers[within]
            flat = len(shapes) == 1 and not each.shape.lstrip().startswith("(")
            element = int(each.operands[0]) if flat else element
            if caller.operation == "while":
                within = caller.called["body"][0]
                each = _result(program, within, element)
            elif element < len(caller.operands):
                within, each = (
                    outside,
                    program.computations[outside].get(caller.operands[element], caller),
                )
            else:
                break
        elif each.operation == "while":
            within = each.called["body"][0]
            each = _result(program, within, element)
        elif each.operation == "tuple" and element < len(each.operands):
            each = scope.get(each.operands[element], each)
        elif each.operation in PASSED and each.operands and each.operands[0] in scope:
            element = each.number("index", element)
            each = scope[each.operands[0]]
        else:
            break
    return each


def _result(program: HloProgram, name: str, element: int) -> Instruction:
    """Return the instruction of an element of a computation's result."""
    root = program.roots[name]
    if root.operation != "tuple" or element >= len(root.operands):
        return root
    return program.computations[name].get(root.operands[element], root)


def _leaf(stack: str) -> tuple[str, str]:
    """Return the role and the path of an argument: `state.params['blocks']['up']`."""
    parts = re.findall(r"[\w]+", stack.replace("\\", ""))
    if parts[0] == "batch":
        return "batch", "/".join(parts)
    return _ROLES.get(parts[1], "state"), "/".join(parts[1:])


def _short(stack: str) -> str:
    """Return a name stack without the transformations around the model's own names."""
    parts = [part for part in stack.split("/") if part and not _WRAPPERS.match(part)]
    return "/".join(parts[-3:])


def _rows(text: str) -> list[tuple[str, str]]:
    split = (line.split(" ", 1) for line in text.splitlines())
    return [(number, rest) for number, rest in split]


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", text)
    return found[1] if found else ""
