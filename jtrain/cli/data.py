"""`jtrain data prepare FILES` and `jtrain data show CONFIG`: text to tokens, rows to look at."""

import argparse
import importlib
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.config.suggestions import did_you_mean
from jtrain.errors import UserError

DOES = {
    "prepare": "write text as token files, which a run reads without a tokenizer",
    "show": "print what a config's batches hold: rows as text, pictures, numbers",
}


def main(argv: Sequence[str]) -> int:
    """Does what was asked; gives the exit code."""
    does, *rest = argv or ["--help"]
    if does == "prepare":
        from jtrain.cli.data_prepare import prepare_files

        return prepare_files(rest)
    if does == "show":
        from jtrain.cli.data_show import show

        return show(rest)
    if does in {"-h", "--help"}:
        print("\n".join(f"jtrain data {name:8} {what}" for name, what in DOES.items()))
        return 0
    raise UserError(
        f"jtrain data: {does} is none of {', '.join(DOES)}{did_you_mean(does, list(DOES))}; "
        f"write jtrain data prepare FILES --out DIR, or jtrain data show CONFIG"
    )


def _arguments() -> Arguments:
    """What may follow `jtrain data`, of either kind."""
    return _Either("data", "\n".join(DOES.values()))


class _Either(Arguments):
    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        does, *rest = argv
        module = importlib.import_module(f"jtrain.cli.data_{does}")
        return getattr(module, f"{does}_arguments")().parse(rest)
