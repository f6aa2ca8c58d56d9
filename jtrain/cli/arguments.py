"""Command-line arguments of a verb: a config or a run, KEY=VALUE settings and options."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jtrain.errors import CheckpointError, UserError
from jtrain.errors.spelling import did_you_mean


class Arguments(argparse.ArgumentParser):
    """Argument parser of a verb; it raises UserError."""

    def __init__(self, verb: str, description: str, *examples: str):
        super().__init__(
            prog=f"jtrain {verb}",
            description=description,
            epilog="\n".join(
                ["for example:", *(f"  jtrain {verb} {e}".rstrip() for e in examples)]
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._example = f"jtrain {verb} {examples[0] if examples else ''}".partition("   ")[0]

    def add_run(self, settings: str = "") -> None:
        """Add the run, and `settings`: the sections whose values may be changed."""
        words = "a directory with a run, or its name in runs/"
        self.add_argument("run", metavar="RUN", help=words)
        if settings:
            words = f"values to change, of {settings} only"
            self.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)

    def add_config(self) -> None:
        """Add the config and its settings, as `words`."""
        words = "a YAML file, values to change"
        self.add_argument("words", metavar="CONFIG [KEY=VALUE]", nargs="*", help=words)

    def add_step(self) -> None:
        """Add the step of a checkpoint."""
        self.add_argument("--step", default="newest", help="newest (default), best or a number")

    def add_json(self) -> None:
        """Add the choice of JSON in place of text."""
        self.add_argument("--json", action="store_true", help="print one JSON object")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; options may stand anywhere among the words."""
        args, unknown = self.parse_known_intermixed_args(argv)
        for word in unknown:
            raise UserError(self._unknown_option(word))
        config = getattr(args, "config", "")
        if isinstance(config, str) and "=" in config and not Path(config).exists():
            self.config_and_words([config, *getattr(args, "settings", ())])
        return args

    def config_and_words(self, words: Sequence[str], options: str = "") -> tuple[str, list[str]]:
        """Split the words into the config file and the rest.

        Raises:
            UserError: if the first word is not a config file.
        """
        path, *rest = words or [""]
        if path and "=" not in path:
            return path, rest
        command = " ".join(filter(None, [self.prog, "configs/NAME.yaml", options, path, *rest]))
        raise UserError(
            f"{self.prog}: the first word is a config file, found {path or 'nothing'}; "
            f"write {command}{_configs()}"
        )

    def error(self, message: str):
        """Raise a UserError with the message of argparse."""
        _, required, names = message.partition("the following arguments are required: ")
        missing = names.split(", ")
        if "CONFIG" in missing:
            raise UserError(
                f"{self.prog}: a config file is missing; write "
                f"{_example(self._example)}{_configs()}"
            )
        if required:
            names = ", ".join(name for name in missing if name != "KEY=VALUE")
            message = f"{required}{names}; write {self._example}"
        raise UserError(f"{self.prog}: {message}; {self.prog} --help lists the options")

    def _unknown_option(self, word: str) -> str:
        """Return the message for an unknown option: the known options and a suggestion."""
        if not word.startswith("-"):
            return f"{self.prog}: {word} is one word too many; write {self._example}"
        options = [name for action in self._actions for name in action.option_strings]
        return (
            f"{self.prog}: no option {word}; the options are {', '.join(options)}"
            f"{did_you_mean(word, options)}; a value is set by KEY=VALUE, without dashes"
        )


def _example(command: str) -> str:
    """Return an example with its config by name, where `configs/` does not exist."""
    return command if Path("configs").is_dir() else re.sub(r"configs/(\w+)\.yaml", r"\1", command)


def _configs() -> str:
    """Return a list of the configs in `configs/`, or of the shipped configs."""
    local = [str(path) for path in sorted(Path("configs").glob("*.yaml"))]
    if local:
        return f"; configs/ has {', '.join(Path(path).name for path in local)}"
    from jtrain.config.lookup import shipped_configs  # needs pydantic, which doctor must not

    return f"; these come with jtrain: {', '.join(shipped_configs())}"


def find_config(run: str, verb: str) -> Path:
    """Return the config of a run, by its directory or its name in runs/.

    Raises:
        ConfigError: if the run does not exist, or a link leads out of its directory.
    """
    from jtrain.io.regular_files import check_no_links
    from jtrain.train.run_dir import find_run  # needs JAX, which --help must not

    directory = find_run(run, f"jtrain {verb}")
    check_no_links(directory)
    return directory / "config.yaml"


def parse_step(step: str, verb: str) -> int | Literal["newest", "best"]:
    """Return the requested step: a number, newest or best."""
    if step == "newest" or step == "best":
        return step
    if step.isdigit():
        return int(step)
    raise CheckpointError(
        f"jtrain {verb}: --step {step} is not a step; write newest, best or a number"
    )
