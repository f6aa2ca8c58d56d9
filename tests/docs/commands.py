"""The commands that the pages show, and how many devices each is meant for. Not a test itself.

They stand in blocks of `sh` and `bash`. A comment of a line before a block says what cannot
be read off the commands: `<!-- devices: 32 -->`, of all processes together, or
`<!-- not run: REASON -->` for what no test can run (in a block that has both, for what is no
`jtrain`).
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (devices|not run): (.*) -->")
COMMAND = re.compile(r"(?:^|.*?[\s=;])jtrain (\w+.*)")
SCRIPT = re.compile(r"scripts/\w+\.sh .*?\s(run .*)")  # which starts a run elsewhere
ON_PROCESS = 8  # devices of the process that tests


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of jtrain."""

    page: str
    line: str
    """As it stands there."""
    words: tuple[str, ...]
    """What follows `jtrain`."""
    devices: int
    """Of all processes together."""

    @property
    def verb(self) -> str:
        """The first word; behind `launch` and its options `launch` still."""
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


@dataclasses.dataclass(frozen=True)
class Block:
    """Block between two fences, and its marks."""

    page: str
    text: str
    devices: int
    reason: str
    """Why no test runs it; empty: some do."""


def blocks() -> list[Block]:
    """Return the blocks that hold commands."""
    found = []
    for page in PAGES:
        for marks, language, text in FENCE.findall(page.read_text()):
            said = dict(MARK.findall(marks))
            if language in {"sh", "bash"}:
                name = str(page.relative_to(ROOT))
                devices = int(said.get("devices", 0))
                found.append(Block(name, text, devices, said.get("not run", "")))
    return found


def commands() -> list[Command]:
    """Return the commands of jtrain that tests run."""
    found = []
    for block in blocks():
        if block.reason and not block.devices:
            continue
        for line in lines(block):
            if words := words_of(line):
                count = block.devices or _devices(line, words)
                found.append(Command(block.page, line, words, count))
    return found


def lines(block: Block) -> Iterator[str]:
    """Yield the lines with a command, without comments."""
    for line in block.text.splitlines():
        plain = re.split(r"\s{3,}\S", re.sub(r"(^|\s)#.*", "", line.strip()))[0].strip()
        if plain:
            yield plain


def words_of(line: str) -> tuple[str, ...]:
    """Return the words after `jtrain` on a line; none where it has none."""
    found = SCRIPT.fullmatch(line) or COMMAND.fullmatch(line)
    if not found:
        return ()
    typed = found[1] if found[1].count("'") % 2 == 0 else found[1].rstrip("'")  # of a longer quote
    return tuple(shlex.split(typed))


def _devices(line: str, words: tuple[str, ...]) -> int:
    """Return the devices that the command names, or all."""
    for pattern in (r"device_count=(\d+)", r"parallel\.devices=(\d+)", r"devices: (\d+)"):
        if found := re.search(pattern, line):
            return int(found[1])
    if words[0] == "launch":
        of = lambda option: int(words[words.index(option) + 1]) if option in words else 0
        return (of("--processes") or 2) * (of("--devices") or 1)
    return ON_PROCESS
