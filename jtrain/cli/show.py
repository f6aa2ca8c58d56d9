"""`jtrain show CONFIG`: the values of a config and the origin of each."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error
from jtrain.cli.output import print_text as print
from jtrain.config.dump import dump, flatten, to_plain
from jtrain.config.messages import explain, json_schema
from jtrain.config.resolve import ResolvedConfig, resolve
from jtrain.config.schema import format_value
from jtrain.config.top import BaseConfig
from jtrain.distributed.cluster import detect
from jtrain.errors import UserError
from jtrain.inspect.plan.topology import find_topology, prepare_environment
from jtrain.io.formatting import align_columns, format_bytes, format_count

if TYPE_CHECKING:
    from jtrain.train.summary import LeafSize, StepFlops, Summary


def main(argv: Sequence[str]) -> int:
    """Print the requested view; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    if args.schema and not args.words:
        print(json.dumps(json_schema(BaseConfig), indent=2))
        return 0
    runs = {"ledger": _ledger, "profile": _profile, "workers": _workers}
    for name, view in runs.items():
        if getattr(args, name):
            print(view(_run_of(args.words, name), args.json))
            return 0
    path, words = parser.config_and_words(args.words)
    if args.topology:
        _prepare(path, args.topology, args.sharding)
    resolved = resolve(Path(path), [word for word in words if "=" in word])
    keys = [word for word in words if "=" not in word]
    helps = [explain(resolved.schema, key) for key in keys]  # every key is validated
    for note in resolved.notes:
        print_error(note)
    views = {
        "schema": lambda: json.dumps(json_schema(resolved.schema), indent=2),
        "cluster": lambda: _cluster(args.json),
        "model": lambda: _model(resolved, args.json),
        "sharding": lambda: _sharding(resolved, args.topology, args.json),
    }
    view = next((view for name, view in views.items() if getattr(args, name)), None)
    if view is not None:
        print(view())
    elif args.yaml:
        print(dump(to_plain(resolved.config)), end="")
    elif args.json:
        print(json.dumps(_as_json(resolved, keys)))
    elif keys:
        tables = [format_table(_select(resolved, [key])) for key in keys]
        parts = [part for pair in zip(tables, helps, strict=True) for part in pair if part]
        print("\n\n".join(parts))
    else:
        print(format_table(_select(resolved, [])))
    return 0


def format_table(rows: Mapping[str, tuple[Any, str]]) -> str:
    """Return a line for each value: its dotted key, the value, its origin."""
    spelt = [(key, format_value(value), origin) for key, (value, origin) in rows.items()]
    keys = max((len(key) for key, _, _ in spelt), default=0)
    values = min(40, max((len(value) for _, value, _ in spelt), default=0))
    return "\n".join(f"{key:{keys}}  {value:{values}}  {origin}" for key, value, origin in spelt)


def _select(resolved: ResolvedConfig, keys: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Return the value and origin of each key: the keys under `keys`, or all."""
    return {
        key: (value, str(resolved.origins[key]))
        for key, value in flatten(to_plain(resolved.config)).items()
        if not keys or any(f"{key}.".startswith(f"{parent}.") for parent in keys)
    }


def _as_json(resolved: ResolvedConfig, keys: Sequence[str]) -> dict[str, Any]:
    rows = _select(resolved, keys).items()
    values = {key: {"value": value, "origin": origin} for key, (value, origin) in rows}
    return {"config": str(resolved.path), "notes": list(resolved.notes), "values": values}


def _cluster(as_json: bool) -> str:
    """Describe the cluster that a run would use here."""
    found = detect(os.environ)
    return json.dumps(found.plain()) if as_json else str(found)


def _model(resolved: ResolvedConfig, as_json: bool) -> str:
    """Describe the leaves, bytes and FLOPs of the config; this starts the devices."""
    from jtrain.train.program import set_up
    from jtrain.train.summary import count_step_flops, summarize

    parts = set_up(resolved.config)
    sizes, work = summarize(parts.resolved.abstract_state), count_step_flops(parts)
    if as_json:
        return json.dumps({"config": str(resolved.path), **_model_as_json(sizes, work)})
    return _model_table(sizes, work)


def _model_as_json(sizes: "Summary", work: "StepFlops") -> dict[str, Any]:
    """Return the sizes as plain numbers, in bytes and FLOPs; each of these only if known."""
    flops = {"flops": work.hardware, "model_flops": work.model}
    return {
        "parameters": sizes.numbers,
        "bytes": {name: part._asdict() for name, part in sizes.parts.items()},
        "device_bytes": sizes.device_bytes,
        **{name: x for name, x in flops.items() if x is not None},
        "leaves": [leaf._asdict() for leaf in sizes.leaves],
    }


def _model_table(sizes: "Summary", work: "StepFlops") -> str:
    """Return a line for each module and leaf, then the sums, in columns."""
    rows = [("leaf", "shape", "dtype", "numbers", "bytes", "on a device")]
    modules: dict[str, list["LeafSize"]] = {}
    for leaf in sizes.leaves:
        modules.setdefault(leaf.name.rpartition("/")[0], []).append(leaf)
    dims = lambda shape: " x ".join(map(str, shape)) or "scalar"
    for module, leaves in modules.items():
        if module:
            numbers, held = sum(x.numbers for x in leaves), sum(x.bytes for x in leaves)
            rows.append((module, "", "", f"{numbers:,}", format_bytes(held), ""))
        for leaf in leaves:
            name = f"{'  ' if module else ''}{leaf.name.rpartition('/')[2]}"
            shard = "unsplit" if leaf.shard == leaf.shape else dims(leaf.shard)
            size = f"{leaf.numbers:,}", format_bytes(leaf.bytes)
            rows.append((name, dims(leaf.shape), leaf.dtype, *size, shard))
    sums = [f"parameters  {sizes.numbers:,} in {len(sizes.leaves)} leaves"]
    for name, part in sizes.parts.items():
        if part.total:
            total, device = map(format_bytes, part)
            sums.append(f"{name:10}  {total}, {device} of it on a device")
    sums.append(f"state       {format_bytes(sizes.device_bytes)} on a device")
    if work.model is not None:
        sums.append(f"step        {format_count(work.model)}FLOP in products of loss and gradient")
    if work.hardware is not None and work.hardware != work.model:
        words = "with what the backward pass computes again"
        sums.append(f"{'' if work.model else 'step':10}  {format_count(work.hardware)}FLOP {words}")
    return "\n".join([*align_columns(rows, right=(3, 4)), "", *sums])


def _run_of(words: Sequence[str], option: str) -> Path:
    """Return the directory of the one run that is named."""
    from jtrain.train.run_dir import find_run

    if len(words) != 1:
        raise UserError(f"jtrain show --{option} takes one run: jtrain show shakespeare --{option}")
    return find_run(words[0].removesuffix("/config.yaml"), "jtrain show")


def _ledger(run: Path, as_json: bool) -> str:
    """Describe where the time of a run went."""
    from jtrain.inspect.ledger import format_ledger, read_ledger

    path = run / "time.jsonl"
    found = read_ledger(path)
    if found is None:
        raise UserError(
            f"jtrain show --ledger: {path} does not exist or is empty: the run has not begun to "
            f"train."
        )
    return json.dumps(found.plain()) if as_json else format_ledger(found)


def _profile(run: Path, as_json: bool) -> str:
    """Describe the newest profile of a run."""
    from jtrain.inspect.profile import format_profile, load_profile

    found = load_profile(run)
    return json.dumps(found.plain()) if as_json else format_profile(found)


def _workers(run: Path, as_json: bool) -> str:
    """Describe the workers of a run on parameter servers: who was there, and when."""
    from jtrain.server.members import attendance, format_attendance

    found = attendance(run)
    if as_json:
        return json.dumps(found)
    return format_attendance(found)


def _prepare(path: str, topology_name: str, sharding: bool) -> None:
    if not sharding:
        raise UserError(
            f"jtrain show: --topology goes with --sharding; write "
            f"jtrain show {path} --sharding --topology {topology_name}"
        )
    prepare_environment(topology_name)


def _sharding(resolved: ResolvedConfig, topology_name: str, as_json: bool) -> str:
    """Describe the sharding of each leaf over these devices, or over a topology's."""
    from jtrain.inspect.sharding_table import describe_sharding, format_sharding
    from jtrain.train.program import set_up

    among = find_topology(topology_name).devices if topology_name else None
    found = describe_sharding(set_up(resolved.config, among=among))
    if as_json:
        return json.dumps({"config": str(resolved.path), **found.plain()})
    return format_sharding(found)


def _arguments() -> Arguments:
    parser = Arguments(
        "show",
        "Print the values of a config and the origin of each: default, base, file and line, or\n"
        "command line. A KEY alone prints its help and its value. No device is started and no\n"
        "model is built, except by --model, which prints each leaf with its shape, its bytes and\n"
        "the share of one device, and trains nothing. --sharding prints how each leaf is split\n"
        "over the devices, or over devices that are not here, and why.",
        "configs/shakespeare.yaml steps=400       the values, one of them changed",
        "configs/shakespeare.yaml optimizer.lr    the help and the value of a key",
        "configs/shakespeare.yaml --model         the leaves, their bytes, a step's FLOPs",
        "configs/gpt2.yaml --sharding --topology v5e:4x4     how each leaf would be sharded",
        "configs/shakespeare.yaml --cluster       which processes train together, and why",
        "configs/shakespeare.yaml --schema        the JSON schema, for an editor",
        "shakespeare --ledger                     where the time of a run went",
        "shakespeare --profile                    where the time of some steps went",
        "digits --workers                         who worked for a run on parameter servers, when",
        "digits --yaml > mine.yaml                a shipped config, to be edited",
    )
    words = "a YAML file, values to change, keys to explain"
    schema = "print the JSON schema; without CONFIG, for the keys of every config"
    parser.add_argument("words", metavar="CONFIG [KEY=VALUE | KEY]", nargs="*", help=words)
    parser.add_argument("--schema", action="store_true", help=schema)
    model = "print the model's leaves, bytes on a device and FLOPs; starts the devices"
    parser.add_argument("--model", action="store_true", help=model)
    sharding = "print how each leaf of the state is split over the devices, and why"
    parser.add_argument("--sharding", action="store_true", help=sharding)
    devices = "with --sharding, the devices: v5e:4x4, 2*v5p:4x4x4, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=devices)
    cluster = "print the cluster that a run would use here, and the variables that set it"
    parser.add_argument("--cluster", action="store_true", help=cluster)
    ledger = "of a run: print the time that trained, waited, saved, restarted and was lost"
    parser.add_argument("--ledger", action="store_true", help=ledger)
    words = "of a run: print the profile that `jtrain run --profile` made"
    parser.add_argument("--profile", action="store_true", help=words)
    workers = "of a run on parameter servers: print who worked when, why it left, its leases"
    parser.add_argument("--workers", action="store_true", help=workers)
    words = "print every value as a config file"
    parser.add_argument("--yaml", action="store_true", help=words)
    parser.add_json()
    return parser
