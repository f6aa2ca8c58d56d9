"""Each command that a page shows does what it says, typed where there are as many devices.

Commands stand in blocks of `sh` and `bash`. A comment of a line before a block says what cannot
be read off the commands: `<!-- devices: 32 -->`, of all processes together, or
`<!-- not run: REASON -->` for what no test can run (in a block that has both, for what is no
`jtrain`).

What a page names is kept, and what makes it small goes before: `TINY` of the config, a rehearsal
(`--fast`) in the place of a whole run, two steps where that is not enough. What takes minutes is
slow, and so are four of five of the runs; what needs the compiler of a TPU or GPU is marked so.
"""

import dataclasses
import glob
import importlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from plain_environ import run_python
from tiny_configs import TINY, write_sets

import jtrain as jt
from jtrain.cli import VERBS, main
from jtrain.config.dump import dump, to_plain
from jtrain.config.resolve import resolve
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.distributed.manifests.machines import TopologyName

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


ALL = commands()
NO_MATTER = ("export ", "#!")  # set variables, which tests/docs/test_clusters.py reads
TOLD = "<!-- not run: REASON --> before its block, if no test can run it"
TESTED: set[str] = set()  # verbs
CHARACTERS = TINY["shakespeare"]


def of(*verbs: str) -> pytest.MarkDecorator:
    """Return the commands of some verbs, those for TPUs marked."""
    once = {(c.words, c.devices): c for c in reversed(ALL) if c.verb in verbs}  # of all pages
    chosen = [
        pytest.param(c, marks=pytest.mark.compiler if _compiles(c) else [], id=str(c))
        for c in reversed(once.values())
    ]
    if {"run", "launch"} & {*verbs}:  # each of them compiles a program of its own
        every = 5 if "run" in verbs else 3
        chosen = [
            pytest.param(
                *c.values, marks=[*c.marks, *[pytest.mark.slow] * (at % every > 0)], id=c.id
            )
            for at, c in enumerate(chosen)
        ]
    assert chosen, f"no page shows {verbs}"
    TESTED.update(verbs)
    return pytest.mark.parametrize("command", chosen)


def _compiles(command: Command) -> bool:
    """Return whether the command needs the compiler of a TPU or GPU; a manifest does not."""
    absent = "v5e" in command.line or "h100" in command.line
    return absent and command.verb != "launch"


def test_every_line_is_run_or_its_block_says_why_not():
    for block in blocks():
        if not block.reason:
            for line in lines(block):
                assert words_of(line) or line.startswith(NO_MATTER), f"{block.page}: {line}: {TOLD}"


def test_every_verb_has_a_test_here():
    assert {c.verb for c in ALL} == set(VERBS) == TESTED


@pytest.mark.usefixtures("from_the_top")
def test_each_can_be_typed():
    for command in ALL:
        verb, *words = command.words
        if verb == "launch":
            verb, *words = words[words.index("run") :]
        assert verb in VERBS, command
        module = importlib.import_module(f"jtrain.cli.{verb}")
        if hasattr(module, "arguments_of"):  # it has subcommands
            typed = module.arguments_of(words[0]).parse(words[1:])
        else:
            typed = module._arguments().parse(words)
        if "config" in typed and typed.config.startswith("configs/"):
            resolve(typed.config, typed.settings)


# Done, each where a person would type it.


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the configs, experiments, data, and runs of a tiny text."""
    place = tmp_path_factory.mktemp("house")
    for name in ("configs", "experiments"):
        # Another worker compiles to files of passing names there.
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    write_sets(place / "sets")
    for file in ("plays/one.txt", "plays/two.txt", "notes/a.txt", "more.txt"):
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text("Shall I compare thee to a summer's day? Thou art more.\n" * 80)
    rows = (json.dumps({"field": 1, "text": f"row {i} of the web, {i + 1}"}) for i in range(200))
    (place / "web.jsonl").write_text("\n".join(rows))
    talk = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "Thou art."}]
    (place / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 200)
    task = {"context": "Thou art ", "choices": ["more", "a day"], "answer": 0}
    (place / "questions.jsonl").write_text(json.dumps(task))
    pair = {"anchor": "to thee", "positive": "Thou art more", "negatives": ["a day", "Shall I"]}
    (place / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 200)
    (place / "long.txt").write_text("a thousandth of it has to be a row of 1,024 tokens. " * 25_000)
    prepare(str(place / "long.txt"), place / "data" / "web", tokenizing=ByteTokens())
    return place


@pytest.fixture(scope="module")
def trained(house: Path) -> Path:
    """Return the same folder with runs, by the names that pages give them."""
    with pytest.MonkeyPatch.context() as patch:
        _home(house, house, patch)
        every = ["steps=260", "evaluate.every=50", "checkpoint.every=50", "checkpoint.keep=9"]
        given = [*CHARACTERS, *every, "parallel.kind=single", "log.every=10"]
        for name, rate in (("shakespeare", "2e-3"), ("shakespeare-2", "1e-3")):
            settings = [*given, f"name={name}", f"optimizer.lr={rate}"]
            assert main(["run", "configs/shakespeare.yaml", *settings]) == 0
        digits = [*TINY["digits"], "steps=2", "parallel.kind=single"]
        assert main(["run", "configs/digits.yaml", *digits]) == 0
        sweep = ["shakespeare-sweep/a", "shakespeare-sweep/b"]
        for name in ("wide", "half", "try-1", "try-2", "try-3", *sweep):
            shutil.copytree("runs/shakespeare", f"runs/{name}")
            config = Path("runs", name, "config.yaml")
            said = re.sub("^name: .*$", f"name: {name}", config.read_text(), flags=re.MULTILINE)
            config.write_text(said)
        inputs = jt.load("digits").inputs
        np.savez("scans.npz", **{n: np.zeros((3, *x.shape), x.dtype) for n, x in inputs.items()})
    return house


def _home(house: Path, place: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("JTRAIN_DATA", str(house / "sets"))
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(house / "compiled"))
    patch.chdir(place)


@pytest.fixture
def here(house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the repository without runs."""
    keep = shutil.ignore_patterns("runs", "compiled", "sets")
    shutil.copytree(house, tmp_path / "house", ignore=keep)
    _home(house, tmp_path / "house", monkeypatch)
    return tmp_path / "house"


@pytest.fixture
def used(trained: Path, here: Path) -> Path:
    """Return the same copy with runs."""
    shutil.copytree(trained / "runs", here / "runs")
    shutil.copy(trained / "scans.npz", here)
    return here


def small(command: Command, *more: str) -> list[str]:
    """Return the words of a command, with overrides that make its config small first."""
    words = list(command.words)
    named = (i for i, word in enumerate(words) if word.startswith("configs/"))
    place = next(named, 1)  # or it comes with the package, and is a name alone
    name = Path(words[place]).stem
    tiny = [*TINY[name], *of_page(command, name)]
    said = {word.partition("=")[0] for word in words[place + 1 :]}
    tiny = [setting for setting in tiny if setting.partition("=")[0] not in said]
    return [*words[: place + 1], *tiny, *words[place + 1 :], *more]


def of_page(command: Command, name: str) -> list[str]:
    """Return overrides for the devices of a page: as many rows as shards."""
    if name == "gpt2":
        return ["batch=480", "microbatches=30", "data.path=data/web", "evaluate.batch=32"]
    parts = max(command.devices, 16) if command.devices > ON_PROCESS else 0
    if "--topology" in command.words:
        name = command.words[command.words.index("--topology") + 1]
        topology = TopologyName.parse(name)
        parts = topology.count * topology.chips
    return [f"batch={parts}", f"evaluate.batch={parts}"] if parts else []


def typed(words: list[str], devices: int = ON_PROCESS) -> None:
    """Run the command where there are so many devices; 0: in a process that splits the CPU."""
    if devices == ON_PROCESS:
        assert main(words) == 0
        return
    forced = f"--xla_force_host_platform_device_count={devices} " if devices else ""
    flags = (
        forced
        if os.environ.get("TEST_FLAGS") == "users"
        else f"{forced}--xla_backend_optimization_level=1"
    )
    run_python("-m", "jtrain", *words, env=os.environ | {"XLA_FLAGS": flags})


LOOKS = {"--fast", "--overfit", "--eager", "--find-nan"}


@of("init")
def test_what_is_written_once_is_written(command: Command, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(list(command.words)) == 0
    assert capsys.readouterr().out


@pytest.mark.sampled(3)
@pytest.mark.thorough
@of("run")
def test_a_run_goes_through_all_that_it_does(command: Command, used: Path):
    if command.words[1].startswith("runs/"):  # it is made longer, by fewer steps than there
        words = [re.sub("^steps=.*", "steps=262", word) for word in command.words]
        assert main(words) == 0
        assert "resumes from step 260 of 262" in Path("runs/wide/log.txt").read_text()
        return
    fast = () if LOOKS & {*command.words} else ("--fast",)
    steps = ("steps=20",) if "--find-nan" in command.words else ()
    splits = "parallel.devices" in command.line
    typed(small(command, *steps, *fast), 0 if splits else command.devices)


@pytest.mark.thorough
@of("show", "data")
def test_what_shows_values_and_data_shows_them(command: Command, here: Path, capsys):
    words = [
        path
        for word in command.words
        for path in (sorted(glob.glob(word)) if "*" in word else [word])
    ]
    if "data/web" in words:
        shutil.rmtree("data/web")
    if "data/web/tokenizer.json" in words:
        shutil.rmtree("data/web")
        prepare = ["web.jsonl", "--field", "text", "--tokenizer", "bpe", "--vocab", "300"]
        assert main(["data", "prepare", *prepare, "--out", "data/web"]) == 0
    if "8192" in words:  # more than so little text has
        words[words.index("8192")] = "300"
    if "configs/gpt2.yaml" in words:
        words.append("data.path=data/web")
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.thorough
@of("doctor", "eval", "sample", "predict", "report", "replay", "audit", "diff", "ckpt", "export")
def test_what_is_done_with_a_run_is_done(command: Command, used: Path, capsys):
    assert main([word.replace("200", "20") if command.verb == "sample" else word
                 for word in command.words]) == 0  # fmt: skip
    assert capsys.readouterr().out


@of("work")
def test_a_worker_looks_for_its_run(command: Command, here: Path, capsys):
    """tests/server/test_server_processes.py has runs that it joins; here the run is not running."""
    config = resolve(Path("configs/digits.yaml"), ["name=served", "parallel.kind=server"]).config
    run = here / "runs" / command.words[1]
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(to_plain(config)))
    assert main([*command.words, "--wait", "0"]) == 70
    assert "Start it: jtrain run runs/served/config.yaml" in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.thorough
@of("plan", "explain", "range", "eject")
def test_a_step_is_planned_or_explained(command: Command, used: Path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(used / "cache"))  # of the compiler's answers
    steps = ["--steps", "20"] if command.verb == "range" and "--steps" not in command.words else []
    assert main(small(command, *steps)) == 0
    assert capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.thorough
@of("launch")
def test_several_processes_train(command: Command, here: Path):
    run_python("-m", "jtrain", *small(command, "steps=4", "evaluate.every=0"))


@pytest.mark.slow
@of("sweep", "check", "museum")
def test_what_takes_minutes_comes_to_its_end(command: Command, here: Path, capsys):
    settings = ["steps=4", "evaluate.every=2"] if command.verb == "sweep" else []
    museum = command.verb == "museum"  # it has no config
    words = list(command.words) if museum else small(command, *settings)
    words = ["2" if word == "20" else word for word in words]  # trials
    words = [word for word in words if word != "steps=200"]
    assert main(words) == 0
    assert capsys.readouterr().out
