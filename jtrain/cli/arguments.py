"""What follows a verb: a config file, KEY=VALUE for what to change, and options."""

import argparse
import difflib
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jtrain.config.shipped_configs import shipped_configs
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import UserError


class Arguments(argparse.ArgumentParser):
    """A parser of what was typed after a verb; mistakes are UserErrors."""

    def __init__(self, verb: str, does: str, *examples: str):
        super().__init__(
            prog=f"jtrain {verb}",
            description=does,
            epilog="\n".join(["for example:", *(f"  jtrain {verb} {e}" for e in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._example = f"jtrain {verb} {examples[0] if examples else ''}".partition("   ")[0]

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """What was typed, options anywhere among the words."""
        self._refuse_spaces(argv)
        typed, strange = self.parse_known_intermixed_args(argv)
        for word in strange:
            raise UserError(self._no_option(word, argv))
        config = getattr(typed, "config", "")
        if isinstance(config, str) and "=" in config and not Path(config).exists():
            self.config_and_words([config, *getattr(typed, "settings", ())])
        return typed

    def config_and_words(self, words: Sequence[str], options: str = "") -> tuple[str, list[str]]:
        """The config file, and the words after it.

        Args:
            options: what else the verb must be told, as it is typed.

        Raises:
            UserError: if the first word is none.
        """
        path, *rest = words or [""]
        if path and "=" not in path:
            return path, rest
        typed = " ".join(filter(None, [self.prog, "configs/NAME.yaml", options, path, *rest]))
        raise UserError(
            f"{self.prog}: the first word is a config file, found {path or 'nothing'}; "
            f"write {typed}{_configs()}"
        )

    def error(self, message: str):
        """A mistake in what was typed."""
        lacking = message.removeprefix("the following arguments are required: ").split(", ")
        if "CONFIG" in lacking:
            raise UserError(
                f"{self.prog}: says what to do with a config file, and none was named; write "
                f"{_example(self._example)}{_configs()}"
            )
        required = [name for name in lacking if name != "KEY=VALUE"]
        if lacking != [message]:
            message = f"the following arguments are required: {', '.join(required)}"
            message += f"; write {self._example}"
        raise UserError(f"{self.prog}: {message}; {self.prog} --help says how")

    def _refuse_spaces(self, argv: Sequence[str]) -> None:
        """Refuses a setting that was typed with spaces around its `=`."""
        for i, word in enumerate(argv):
            if i == 0:  # the config, or the run
                continue
            after = argv[i + 1] if i + 1 < len(argv) else ""
            if not after.startswith("=") and not (word.endswith("=") and _is_value(after)):
                continue
            parts, end = [word, after], i + 2
            if after == "=" and end < len(argv):
                parts.append(argv[end])
                end += 1
            whole = [*argv[:i], "".join(parts), *argv[end:]]
            raise UserError(
                f"{self.prog}: {' '.join(parts)}: a setting has no spaces around its `=`; write "
                f"{shlex.join([*self.prog.split(), *whole])}"
            )

    def _no_option(self, word: str, argv: Sequence[str]) -> str:
        """What to say of an option that the verb has not: which it has, and what was meant."""
        key, equals, value = word.lstrip("-").partition("=")
        key = key.replace("-", "_")
        after = next((b for a, b in itertools.pairwise(argv) if a == word), "")
        value = value if equals else after if _is_value(after) else "VALUE"
        options = [name for action in self._actions for name in action.option_strings]
        # `--step` was meant for `--stpe 3`, and no option for `--steps 100`, which is a key.
        close = not equals and key not in COMMON and difflib.get_close_matches(word, options, 1)
        meant = did_you_mean(word, options) if close else f"; a value is set by {key}={value}"
        return f"{self.prog}: no option {word}; there is {', '.join(options)}{meant}"


# Keys of every config and of most experiments, which may be typed as if they were options.
COMMON = {"steps", "batch", "seed", "name", "microbatches", "steps_per_call", "lr", "epochs"}


def _is_value(word: str) -> bool:
    return bool(word) and "=" not in word and not word.startswith("-")


def _example(typed: str) -> str:
    """Return an example with its config by name, where `configs/` is not here."""
    return typed if Path("configs").is_dir() else re.sub(r"configs/(\w+)\.yaml", r"\1", typed)


def _configs() -> str:
    """The configs that are here, or those that come with jtrain."""
    here = [str(path) for path in sorted(Path("configs").glob("*.yaml"))]
    if here:
        return f"; configs/ has {', '.join(Path(path).name for path in here)}"
    return f"; these come with jtrain: {', '.join(shipped_configs())}"
