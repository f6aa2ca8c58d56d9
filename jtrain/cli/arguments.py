"""What follows a verb: a config file, KEY=VALUE for what to change, and options."""

import argparse
from collections.abc import Sequence

from jtrain.config.nearest import did_you_mean
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

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """What was typed, options anywhere among the words."""
        typed, strange = self.parse_known_intermixed_args(argv)
        for word in strange:
            key, equals, _ = word.lstrip("-").partition("=")
            options = [name for action in self._actions for name in action.option_strings]
            meant = f"; a value is set by {word.lstrip('-')}" if equals else ""
            meant = meant or did_you_mean(word, options) or f"; a value is set by {key}=VALUE"
            raise UserError(f"{self.prog}: no option {word}; there is {', '.join(options)}{meant}")
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
        typed = " ".join(filter(None, [self.prog, "configs/NAME.yaml", options, path]))
        raise UserError(
            f"{self.prog}: the first word is a config file, found {path or 'nothing'}; "
            f"write {typed}"
        )

    def error(self, message: str):
        """A mistake in what was typed."""
        raise UserError(f"{self.prog}: {message}; {self.prog} --help says how")
