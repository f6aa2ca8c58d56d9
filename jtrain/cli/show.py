"""`jtrain show CONFIG`: the values of a run, and where each was said."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments
from jtrain.config.command_line import spell
from jtrain.config.dump import dump, flatten, to_plain
from jtrain.config.explain import explain, json_schema
from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.config.top import BaseConfig
from jtrain.distributed.cluster import detect
from jtrain.errors import UserError
from jtrain.inspect.plan.topology import prepare, topology


def main(argv: Sequence[str]) -> int:
    """Prints what was asked for; gives the exit code."""
    parser = _arguments()
    typed = parser.parse(argv)
    if typed.schema and not typed.words:
        print(json.dumps(json_schema(BaseConfig), indent=2))
        return 0
    path, words = parser.config_and_words(typed.words)
    if typed.topology:
        _prepare(path, typed.topology, typed.sharding)
    resolved = resolve(Path(path), [word for word in words if "=" in word])
    keys = [word for word in words if "=" not in word]
    helps = [explain(resolved.schema, key) for key in keys]  # every key is checked
    for note in resolved.notes:
        print(note, file=sys.stderr)
    looks = {
        "schema": lambda: json.dumps(json_schema(resolved.schema), indent=2),
        "cluster": lambda: _cluster(typed.json),
        "model": lambda: _model(resolved, typed.json),
        "sharding": lambda: _sharding(resolved, typed.topology, typed.json),
    }
    look = next((look for name, look in looks.items() if getattr(typed, name)), None)
    if look is not None:
        print(look())
    elif typed.yaml:
        print(dump(to_plain(resolved.config)), end="")
    elif typed.json:
        print(json.dumps(_object(resolved, keys)))
    elif keys:
        tables = [table(_within(resolved, [key])) for key in keys]
        print(
            "\n\n".join("\n\n".join(filter(None, pair)) for pair in zip(tables, helps, strict=True))
        )
    else:
        print(table(_within(resolved, [])))
    return 0


def table(rows: Mapping[str, tuple[Any, str]]) -> str:
    """A line for each value: its dotted key, the value, where it was said."""
    spelt = [(key, spell(value), origin) for key, (value, origin) in rows.items()]
    keys = max((len(key) for key, _, _ in spelt), default=0)
    values = min(40, max((len(value) for _, value, _ in spelt), default=0))
    return "\n".join(f"{key:{keys}}  {value:{values}}  {origin}" for key, value, origin in spelt)


def _within(resolved: ResolvedConfig, keys: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Each value and where it was said, by dotted key: those under `keys`, or all."""
    return {
        key: (value, str(resolved.origins[key]))
        for key, value in flatten(to_plain(resolved.config)).items()
        if not keys or any(f"{key}.".startswith(f"{above}.") for above in keys)
    }


def _object(resolved: ResolvedConfig, keys: Sequence[str]) -> dict[str, Any]:
    rows = _within(resolved, keys).items()
    values = {key: {"value": value, "origin": origin} for key, (value, origin) in rows}
    return {"config": str(resolved.path), "notes": list(resolved.notes), "values": values}


def _cluster(as_json: bool) -> str:
    """Which process of which cluster a run would be here."""
    found = detect(os.environ)
    return json.dumps(found.plain()) if as_json else str(found)


def _model(resolved: ResolvedConfig, as_json: bool) -> str:
    """The leaves, bytes and work of what the config trains; this starts the devices."""
    from jtrain.train.setup import set_up
    from jtrain.train.summary import plain, step_flops, summary, table

    parts = set_up(resolved.config)
    sizes, work = summary(parts.like), step_flops(parts)
    if as_json:
        return json.dumps({"config": str(resolved.path), **plain(sizes, work)})
    return table(sizes, work)


def _prepare(path: str, where: str, sharding: bool) -> None:
    if not sharding:
        raise UserError(
            f"jtrain show: --topology goes with --sharding; write "
            f"jtrain show {path} --sharding --topology {where}"
        )
    prepare(where)


def _sharding(resolved: ResolvedConfig, where: str, as_json: bool) -> str:
    """Where each leaf of the state would lie on these devices, or on those of a topology."""
    from jtrain.inspect.sharding_table import laid, table
    from jtrain.train.setup import set_up

    among = topology(where).devices if where else None
    found = laid(set_up(resolved.config, among=among))
    if as_json:
        return json.dumps({"config": str(resolved.path), **found.plain()})
    return table(found)


def _arguments() -> Arguments:
    parser = Arguments(
        "show",
        "Prints the values of a config and where each was said: default, base, file and line, or\n"
        "command line. A KEY alone prints its help and its value. No device is started and no\n"
        "model is built, unless --model asks for it: then each leaf is told with its shape, its\n"
        "bytes and what one device holds of it, and nothing is trained. --sharding tells of each\n"
        "leaf how it is split over the devices, or over some that are not here, and why.",
        "configs/shakespeare.yaml steps=400       the values, one of them changed",
        "configs/shakespeare.yaml optimizer.lr    the help and the value of a key",
        "configs/shakespeare.yaml --model         the leaves, their bytes, a step's FLOPs",
        "configs/gpt2.yaml --sharding --topology v5e:4x4     where each leaf would lie, and why",
        "configs/shakespeare.yaml --cluster       which processes train together, and why",
        "configs/shakespeare.yaml --schema        the JSON schema, for an editor",
        "digits --yaml > mine.yaml                a config that comes with jtrain, to be changed",
    )
    words = "a YAML file, values to change, keys to explain"
    schema = "print the JSON schema; without CONFIG, of the keys of every config"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE | KEY]", nargs="*", help=words)
    parser.add_argument("--schema", action="store_true", help=schema)
    model = "print the model's leaves, bytes on a device and FLOPs; starts the devices"
    parser.add_argument("--model", action="store_true", help=model)
    sharding = "print how each leaf of the state is split over the devices, and why"
    parser.add_argument("--sharding", action="store_true", help=sharding)
    devices = "with --sharding, the devices: v5e:4x4, 2*v5p:4x4x4, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=devices)
    cluster = "print which processes a run would be of here, and by what variables"
    parser.add_argument("--cluster", action="store_true", help=cluster)
    words = "print every value as a config of its own, to be written to a file"
    parser.add_argument("--yaml", action="store_true", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
