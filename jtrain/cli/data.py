"""`jtrain data prepare FILES` and `jtrain data show CONFIG`: tokenize text, print rows."""

import argparse
import importlib
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.errors import UserError
from jtrain.errors.spelling import did_you_mean

DOES = {
    "prepare": "write text as token files, which a run reads without a tokenizer",
    "show": "print rows of a config's batches as text, pictures or numbers",
}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; return the exit code."""
    action, *rest = argv or ["--help"]
    if action == "prepare":
        from jtrain.cli.data_prepare import prepare_files

        return prepare_files(rest)
    if action == "show":
        from jtrain.cli.data_show import show

        return show(rest)
    if action in {"-h", "--help"}:
        print("\n".join(f"jtrain data {name:8} {what}" for name, what in DOES.items()))
        return 0
    raise UserError(
        f"jtrain data: {action} is not one of {', '.join(DOES)}{did_you_mean(action, list(DOES))}; "
        f"write jtrain data prepare FILES --out DIR, or jtrain data show CONFIG"
    )


def _arguments() -> Arguments:
    """Return a parser of the arguments of `jtrain data`."""
    return _DataArguments("data", "\n".join(DOES.values()))


class _DataArguments(Arguments):
    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        action, *rest = argv
        return arguments_of(action).parse(rest)


def arguments_of(action: str) -> Arguments:
    """Return a parser of the arguments of a subcommand."""
    module = importlib.import_module(f"jtrain.cli.data_{action}")
    return getattr(module, f"{action}_arguments")()
