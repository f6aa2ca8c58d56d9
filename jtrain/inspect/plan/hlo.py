"""The text of a compiled program as computations of instructions, and how often each is run."""

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
ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
BITS = re.compile(r"\d+")


class HloError(ValueError):
    """Text of a program, or a part of the text, that this package does not understand."""


class Instruction(NamedTuple):
    """One line: `name = shape operation(operands), attributes`."""

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> Mapping[str, list[str]]:
        """Computations that it calls, by the attribute that names them."""
        return {
            key: [name.strip(" %{}") for name in names.split(",")]
            for key, names in CALLED.findall(self.attributes)
        }


class ExecutedInstruction(NamedTuple):
    """An instruction of a program that runs."""

    instruction: Instruction
    times: int  # in one run of the program
    within: str  # the name of its computation
    counted: bool  # False inside of a loop whose number of turns is not known: it counts as one


class HloProgram:
    """The computations of a compiled program by name.

    Args:
        text: the program as XLA prints it, such as `Compiled.as_text()` of jax.

    Raises:
        HloError: if the text has no entry computation, or calls one that it does not have.
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
                here = self.computations[name]
                here.update(_elements(instruction))
                here[instruction.name] = instruction
                if found[1]:
                    self.roots[name] = instruction
        self._check_whole(len(text))

    def walk(
        self, name: str = "", times: int = 1, counted: bool = True
    ) -> Iterator[ExecutedInstruction]:
        """Yield each instruction that runs. Every side of a branch counts as run."""
        name = name or self.entry
        for instruction in self.computations[name].values():
            yield ExecutedInstruction(instruction, times, name, counted)
            called = instruction.called
            if instruction.operation == "while":
                (body,), (condition,) = called["body"], called["condition"]
                trips = self._trips(instruction, name, condition, body)
                known = counted and trips is not None
                yield from self.walk(body, times * (1 if trips is None else trips), known)
                continue
            for key, names in called.items():
                if key != "to_apply" or instruction.operation == "call":
                    for each in names:
                        yield from self.walk(each, times, counted)

    def _check_whole(self, characters: int) -> None:
        if not self.entry:
            raise HloError(f"no ENTRY computation in {characters} characters")
        for name, computation in self.computations.items():
            for instruction in computation.values():
                for called in (each for names in instruction.called.values() for each in names):
                    if called not in self.computations:
                        raise HloError(f"%{name} calls %{called}, which is not in the text")

    def _trips(self, loop: Instruction, within: str, condition: str, body: str) -> int | None:
        """Return how often a loop turns whose counter goes up to a constant; None for others."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        tests = self.computations[condition].values()
        limits = {i.name: int(i.operands[0]) for i in tests if _is_whole(i)}
        indices = {
            i.name: int(found[1])
            for i in tests
            if i.operation == "get-tuple-element"
            and (found := re.search(r"index=(\d+)", i.attributes))
        }
        for test in tests:
            left, right = (*test.operands, "", "")[:2]
            if "direction=LT" in test.attributes and left in indices and right in limits:
                start = self._constant(within, loop.operands[0], indices[left])
                return max(-(-(limits[right] - start) // self._stride(body, indices[left])), 0)
        return None

    def _stride(self, body: str, index: int) -> int:
        """What an element of the state of a loop goes up by in a turn."""
        there = self.computations[body]
        name, stride = self.roots[body].operands[index], 0
        while name in there:
            instruction = there[name]
            if instruction.operation == "add":
                known = [there[o].operands[0] for o in instruction.operands if _is_whole(there[o])]
                stride += sum(map(int, known))
            elif instruction.operation not in {"copy", "bitcast", "opt-barrier"}:
                break
            name = next((o for o in instruction.operands if not _is_whole(there[o])), "")
        return max(stride, 1)

    def _constant(self, within: str, name: str, element: int) -> int:
        """The number that an element of a tuple is; 0 where it is not a constant."""
        there = self.computations[within]
        while name in there:
            instruction = there[name]
            if instruction.operation == "tuple":
                name = instruction.operands[element]
            elif instruction.operation in {"copy", "bitcast", "opt-barrier"}:
                name = instruction.operands[0]
            else:
                return int(instruction.operands[0]) if _is_whole(instruction) else 0
        return 0


def sizes(shape: str) -> list[int]:
    """The bytes of each array in a shape: one, or those of a tuple."""
    found = []
    for kind, dims in ARRAY.findall(shape):
        bits = 8 if kind == "pred" else int(BITS.findall(kind)[0])
        count = 1
        for dim in dims.split(",") if dims else ():
            count *= int(dim)
        found.append(-(-count * bits // 8))
    return found


def _instruction(name: str, rest: str) -> Instruction:
    plain = _without_layouts(rest)
    operation = OPERATION.search(plain)
    if operation is None:
        return Instruction(name, rest, "", (), "")
    depth, end = 0, len(plain)
    for place in range(operation.end() - 1, len(plain)):
        depth += (plain[place] == "(") - (plain[place] == ")")
        if depth == 0:
            end = place
            break
    inside = plain[operation.end() : end]
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside) if part.strip())
    return Instruction(name, plain[: operation.start()], operation[1], operands, plain[end + 1 :])


def _elements(instruction: Instruction) -> Mapping[str, Instruction]:
    """Return a `get-tuple-element` for each operand that is written short, as `%tuple.3#1`."""
    found = {}
    for operand in instruction.operands:
        while "#" in operand:
            of, _, index = operand.rpartition("#")
            found[operand] = Instruction(
                operand, "", "get-tuple-element", (of,), f", index={index}"
            )
            operand = of
    return found


def _without_layouts(text: str) -> str:
    """The text without `{1,0:T(8,128)}` behind shapes and without comments."""
    text = re.sub(r"/\*.*?\*/", "", text)
    return re.sub(r"(\])\{[\d,]*(?::[^{}]*)?\}", r"\1", text)


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _is_whole(instruction: Instruction) -> bool:
    return instruction.operation == "constant" and instruction.operands[0].lstrip("-").isdigit()
