"""A parser for compiled HLO text: computations, instructions and execution counts."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{\s*$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
OPERATION = re.compile(r"([a-z][\w\-]*)\(")
CALLED = re.compile(
    r"(calls|called_computations|to_apply|body|condition|true_computation|false_computation"
    r"|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:@(\d+))?")
SPACE = re.compile(r"S\((\d+)\)")
DEVICE, HOST = 0, 5  # memory spaces: of the device, and of its host; others are inside the chip
BITS = re.compile(r"\d+")
LAYOUT = re.compile(r"\]\{[\d,]*(?::[^{}]*)?\}")


class HloError(ValueError):
    """HLO text in an unknown format."""


class Instruction(NamedTuple):
    """One line of HLO: `name = shape operation(operands), attributes`."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> Mapping[str, list[str]]:
        """Names of called computations, by attribute."""
        return {
            key: [name.strip(" %{}") for name in names.split(",")]
            for key, names in CALLED.findall(self.attributes)
        }

    def quoted(self, name: str) -> str:
        """Return an attribute such as `op_name="jit(step)/add"`; empty without it."""
        found = re.search(rf'{name}="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def number(self, name: str, default: int = 0) -> int:
        """Return an attribute such as `index=3`."""
        found = re.search(rf"\b{name}=(\d+)", self.attributes)
        return int(found[1]) if found else default


class ExecutedInstruction(NamedTuple):
    """An instruction with the number of its executions."""

    instruction: Instruction
    times: int  # executions in one run of the program
    within: str  # the name of its computation
    counted: bool  # False inside a loop with an unknown number of turns, which counts as one


class HloProgram:
    """The computations of a compiled program by name.

    Args:
        text: the program as XLA prints it, such as `Compiled.as_text()` of jax.

    Raises:
        HloError: if the text has no entry computation, or calls a missing computation.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.entry, name = "", ""
        for line in text.splitlines():
            if head := HEAD.match(line):
                name = head[2]
                self.computations[name] = {}
                self.entry = name if head[1] else self.entry
            elif name and (found := LINE.match(line)):
                instruction = _instruction(found[2], found[3])
                computation = self.computations[name]
                computation.update(_elements(instruction))
                computation[instruction.name] = instruction
                if found[1]:
                    self.roots[name] = instruction
        self._check_complete(len(text))

    def walk(
        self, name: str = "", times: int = 1, counted: bool = True
    ) -> Iterator[ExecutedInstruction]:
        """Yield each executed instruction. Every side of a branch counts as executed."""
        name = name or self.entry
        for instruction in self.computations[name].values():
            yield ExecutedInstruction(instruction, times, name, counted)
            called = instruction.called
            if instruction.operation == "while":
                (body,) = called["body"]
                trips = self.trips(instruction, name)
                known = counted and trips is not None
                yield from self.walk(body, times * (1 if trips is None else trips), known)
                continue
            for key, names in called.items():
                if key != "to_apply" or instruction.operation == "call":
                    for each in names:
                        yield from self.walk(each, times, counted)

    def _check_complete(self, characters: int) -> None:
        if not self.entry:
            raise HloError(f"no ENTRY computation in {characters} characters")
        for name, computation in self.computations.items():
            for instruction in computation.values():
                for called in (each for names in instruction.called.values() for each in names):
                    if called not in self.computations:
                        raise HloError(f"%{name} calls %{called}, which is not in the text")

    def trips(self, loop: Instruction, within: str) -> int | None:
        """Return the number of turns of a loop with a constant limit; None for other loops."""
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        tests = self.computations[condition].values()
        limits = {i.name: int(i.operands[0]) for i in tests if _is_integer(i)}
        indices = {i.name: i.number("index") for i in tests if i.operation == "get-tuple-element"}
        for test in tests:
            left, right = (*test.operands, "", "")[:2]
            if "direction=LT" in test.attributes and left in indices and right in limits:
                start = self._constant(within, loop.operands[0], indices[left])
                return max(-(-(limits[right] - start) // self._stride(body, indices[left])), 0)
        return None

    def _stride(self, body: str, index: int) -> int:
        """Return the increment of an element of a loop's state in one turn."""
        computation = self.computations[body]
        name, stride = self.roots[body].operands[index], 0
        while name in computation:
            instruction = computation[name]
            if instruction.operation == "add":
                known = [
                    computation[o].operands[0]
                    for o in instruction.operands
                    if _is_integer(computation[o])
                ]
                stride += sum(map(int, known))
            elif instruction.operation not in {"copy", "bitcast", "opt-barrier"}:
                break
            name = next((o for o in instruction.operands if not _is_integer(computation[o])), "")
        return max(stride, 1)

    def _constant(self, within: str, name: str, element: int) -> int:
        """Return the value of a tuple element; 0 if it is not a constant."""
        computation = self.computations[within]
        while name in computation:
            instruction = computation[name]
            if instruction.operation == "tuple":
                name = instruction.operands[element]
            elif instruction.operation in {"copy", "bitcast", "opt-barrier"}:
                name = instruction.operands[0]
            else:
                return int(instruction.operands[0]) if _is_integer(instruction) else 0
        return 0


class ArrayShape(NamedTuple):
    """Shape of an array in the text of a program."""

    kind: str  # element type
    dims: tuple[int, ...]
    space: int = DEVICE  # memory space

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        bits = 8 if self.kind == "pred" else int(BITS.findall(self.kind)[0])
        return -(-self.size * bits // 8)


def array_shapes(shape: str) -> list[ArrayShape]:
    """Return each array in a shape, which may be a tuple."""
    return [
        ArrayShape(kind, tuple(map(int, filter(None, dims.split(",")))), int(space or DEVICE))
        for kind, dims, space in ARRAY.findall(shape)
    ]


def array_sizes(shape: str) -> list[int]:
    """Return the bytes of each array in a shape, which may be a tuple."""
    return [array.num_bytes for array in array_shapes(shape)]


def operand_shape(
    instruction: Instruction, index: int, scope: Mapping[str, Instruction]
) -> ArrayShape:
    """Return the shape of an operand; an empty one if it is a tuple or not known."""
    found = scope.get(instruction.operands[index])
    if found is not None and found.operation == "get-tuple-element" and not found.shape:
        of, at = scope.get(found.operands[0]), found.number("index")
        shapes = array_shapes(of.shape) if of else []
        return shapes[at] if at < len(shapes) else ArrayShape("pred", (0,))
    shapes = array_shapes(found.shape) if found else []
    return shapes[0] if shapes else ArrayShape("pred", (0,))


def _instruction(name: str, rest: str) -> Instruction:
    plain = _without_layouts(rest)
    operation = OPERATION.search(plain)
    if operation is None:
        return Instruction(name, rest, "", (), "")
    depth, end = 0, len(plain)
    for position in range(operation.end() - 1, len(plain)):
        depth += (plain[position] == "(") - (plain[position] == ")")
        if depth == 0:
            end = position
            break
    inside = plain[operation.end() : end]
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside) if part.strip())
    return Instruction(name, plain[: operation.start()], operation[1], operands, plain[end + 1 :])


def _elements(instruction: Instruction) -> Mapping[str, Instruction]:
    """Return a `get-tuple-element` for each operand in short form, `%tuple.3#1`."""
    found = {}
    for operand in instruction.operands:
        while "#" in operand:
            parent, _, index = operand.rpartition("#")
            found[operand] = Instruction(
                operand, "", "get-tuple-element", (parent,), f", index={index}"
            )
            operand = parent
    return found


def _without_layouts(text: str) -> str:
    """Return the text without comments and layouts; of `{1,0:T(8,128)S(1)}` stays `@1`."""
    text = re.sub(r"/\*.*?\*/", "", text) if "/*" in text else text
    return LAYOUT.sub(_space, text)


def _space(layout: re.Match[str]) -> str:
    space = SPACE.search(layout[0])
    return f"]@{space[1]}" if space else "]"


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _is_integer(instruction: Instruction) -> bool:
    return instruction.operation == "constant" and instruction.operands[0].lstrip("-").isdigit()
