"""`jtrain completion SHELL`: print a script by which a shell completes jtrain's commands."""

import importlib
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.config.dump import flatten, plain_values
from jtrain.config.explain import find_schemas
from jtrain.config.lookup import YAML, shipped_configs
from jtrain.config.node import Plain
from jtrain.config.resolve import resolve
from jtrain.config.schema import FieldSchema, literal_choices
from jtrain.config.wording import format_value
from jtrain.errors import UserError

SCRIPTS = {"bash": "bash.sh", "zsh": "zsh.zsh", "fish": "fish.fish"}


def main(argv: Sequence[str]) -> int:
    """Print the script of a shell, or the completions of a line; return the exit code."""
    args = _arguments().parse(argv)
    if args.line is not None:
        print("\n".join(complete(args.line)))
    elif args.shell is None:
        raise UserError(f"jtrain completion: name a shell: {', '.join(SCRIPTS)}; {_INSTALL}")
    else:
        print((Path(__file__).parent / "completion_scripts" / SCRIPTS[args.shell]).read_text())
    return 0


def complete(line: str) -> list[str]:
    """Return the words that may stand in the place of the last word of a command line.

    A word that ends in `=`, `.` or `/` is a beginning, after which more is typed. The list is empty
    where the shell completes names of files, and where nothing fits.
    """
    *typed, word = f"{line}|".split()
    word = word[:-1]
    try:
        found = _candidates(typed[1:], word) if typed else []
    except UserError:  # a config that is still being written
        return []
    return sorted(_up_to_next_part(word, [one for one in found if one.startswith(word)]))


def _candidates(typed: Sequence[str], word: str) -> Sequence[str]:
    """Return what may follow the words `typed`, among it what begins otherwise than `word`."""
    from jtrain.cli import VERBS

    if not typed:
        return [*VERBS, "--help", "--version"]
    verb, *words = typed
    if verb not in VERBS:
        return []
    module = importlib.import_module(f"jtrain.cli.{verb}")
    if hasattr(module, "arguments_of"):  # it has subcommands
        if not words:
            return list(module.DOES)
        action, *words = words
        return _of_parser(module.arguments_of(action), words, word) if action in module.DOES else []
    return _of_parser(module._arguments(), words, word)


def _of_parser(parser: Arguments, words: Sequence[str], word: str) -> Sequence[str]:
    """Return what may follow the words of a verb."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    places = [action for action in parser._actions if not action.option_strings]
    positional, awaited = _split(words, options)
    if awaited is not None:
        return list(awaited.choices or ())
    nests = places and places[0].metavar == "VERB ..."  # `jtrain launch OPTIONS VERB ...`
    if nests and (positional or not word.startswith("-")):
        return _candidates(words[words.index(positional[0]) :] if positional else [], word)
    if word.startswith("-"):
        return list(options)
    if not places:
        return []
    place = places[min(len(positional), len(places) - 1)]
    if str(place.metavar) == "RUN":
        return _runs()
    if not str(places[0].metavar).startswith("CONFIG"):
        return list(place.choices or ())
    return _settings(positional[0], positional[1:], word) if positional else _configs(word)


def _split(
    words: Sequence[str], options: Mapping[str, Action]
) -> tuple[Sequence[str], Action | None]:
    """Return the words that are no option, and the option whose value comes next."""
    positional, awaited = [], None
    for word in words:
        if awaited is not None:
            awaited = None
        elif word in options and options[word].nargs != 0:
            awaited = options[word]
        elif not word.startswith("-"):
            positional.append(word)
    return positional, awaited


def _configs(word: str) -> Sequence[str]:
    """Return the configs that come with jtrain, and the folders and YAML files of a path."""
    folder = Path(word.rpartition("/")[0] or ("/" if word.startswith("/") else "."))
    found = [] if "/" in word else list(shipped_configs())
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith("."):
            if path.is_dir():
                found.append(f"{path}/")
            elif path.suffix in YAML:
                found.append(str(path))
    return found


def _runs() -> Sequence[str]:
    """Return the names of the runs in runs/."""
    paths = Path("runs").rglob("config.yaml") if Path("runs").is_dir() else ()
    return [str(path.parent.relative_to("runs")) for path in paths]


def _settings(config: str, settings: Sequence[str], word: str) -> Sequence[str]:
    """Return the keys of a config as `key=`, or the values that a key may have."""
    resolved = resolve(config, [one for one in settings if "=" in one])
    key, equals, _ = word.partition("=")
    if not equals:
        return [f"{name}=" for name in flatten(plain_values(resolved.config))]
    schemas = find_schemas(resolved.schema, key)
    values = [value for schema in schemas for value in _named_values(schema)]
    return [f"{key}={format_value(value)}" for value in dict.fromkeys(values)]


def _named_values(schema: FieldSchema) -> Iterator[Plain]:
    """Yield the values of a key that has names for them: those of a Literal, true and false."""
    for member in schema.members():
        yield from (False, True) if member.annotation is bool else ()
        yield from literal_choices(member.annotation)


def _up_to_next_part(word: str, found: Sequence[str]) -> set[str]:
    """Return the keys of the next table only: for `o` `optimizer.`, and not all that is in it."""
    if not all(one.endswith("=") for one in found):
        return set(found)
    ends = {one: one.find(".", len(word)) for one in found}
    return {one[: end + 1] if end >= 0 else one for one, end in ends.items()}


_INSTALL = 'for example, in ~/.bashrc: eval "$(jtrain completion bash)"'


def _arguments() -> Arguments:
    parser = Arguments(
        "completion",
        "Print a script that completes verbs, options, configs, runs, keys and their values.\n\n"
        'bash: eval "$(jtrain completion bash)" in ~/.bashrc\n'
        'zsh:  eval "$(jtrain completion zsh)" in ~/.zshrc\n'
        "fish: jtrain completion fish > ~/.config/fish/completions/jtrain.fish",
        "bash",
    )
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=[*SCRIPTS], help="the shell")
    words = "print the completions of a command line, one a line; what the scripts call"
    parser.add_argument("--line", metavar="LINE", help=words)
    return parser
