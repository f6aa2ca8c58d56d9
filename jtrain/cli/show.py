"""`jtrain show CONFIG`: the values of a run, and where each was said."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.config.dump import flat
from jtrain.config.explain import explain, json_schema
from jtrain.config.resolve import Resolved, resolve
from jtrain.config.top import Top
from jtrain.config.words import spell
from jtrain.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Prints; gives the exit code."""
    typed = _parser().parse_args(argv)
    settings = [word for word in typed.words if "=" in word]
    keys = [word for word in typed.words if "=" not in word]
    if typed.config is None or "=" in typed.config:
        if not typed.schema or settings or typed.config:
            raise UserError(
                f"jtrain show: the first word is a config file, found {typed.config or 'nothing'}"
            )
        print(json.dumps(json_schema(Top), indent=2))
        return 0
    resolved = resolve(Path(typed.config), settings)
    for note in resolved.notes:
        print(note, file=sys.stderr)
    if typed.schema:
        print(json.dumps(json_schema(resolved.schema), indent=2))
    elif typed.json:
        print(json.dumps(_object(resolved, keys)))
    elif keys:
        print("\n\n".join(_help(resolved, key) for key in keys))
    else:
        print(table(resolved))
    return 0


def table(resolved: Resolved, within: str = "") -> str:
    """A line for each value under a key: its dotted key, the value, where it was said."""
    rows = [
        (key, spell(value), str(resolved.origins[key]))
        for key, value in flat(resolved.config).items()
        if not within or key == within or key.startswith(f"{within}.")
    ]
    keys, values = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return "\n".join(
        f"{key:{keys}}  {value:{min(values, 40)}}  {said}" for key, value, said in rows
    )


def _help(resolved: Resolved, key: str) -> str:
    said = explain(resolved.schema, key)
    rows = table(resolved, key)
    return f"{rows}\n\n{said}" if rows else said


def _object(resolved: Resolved, keys: Sequence[str]) -> dict:
    values = {
        key: {"value": value, "origin": str(resolved.origins[key])}
        for key, value in flat(resolved.config).items()
        if not keys or any(key == k or key.startswith(f"{k}.") for k in keys)
    }
    return {"config": str(resolved.path), "notes": list(resolved.notes), "values": values}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jtrain show",
        description="Prints the values of a config and where each was said: default, base, file "
        "and line, or command line. Starts no device and builds no model.",
        epilog="jtrain show configs/shakespeare.yaml optimizer.lr     the help and value of a key\n"
        "jtrain show configs/shakespeare.yaml steps=400        with a value changed\n"
        "jtrain show configs/shakespeare.yaml --schema         the JSON schema, for an editor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file")
    parser.add_argument(
        "words", metavar="KEY=VALUE | KEY", nargs="*", help="a value to change, or a key to explain"
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema; without CONFIG, of the keys that every config has",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
