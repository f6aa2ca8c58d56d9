"""`jtrain plan CONFIG --topology v5e:4x4`: the cost of a step on devices that are not here."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.errors import DONE, STOPPED, UserError
from jtrain.inspect.plan.topology import Topology, find_topology, prepare_environment

if TYPE_CHECKING:
    from jtrain.train.experiment import RunConfig

NO_FIT = 1  # exit code: the step is larger than the memory of a device


def main(argv: Sequence[str]) -> int:
    """Compile and print; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words, "--topology v5e:4x4")
    if not args.topology:
        raise UserError(
            f"jtrain plan: the devices are missing. Write jtrain plan {path} --topology v5e:4x4, "
            f"or cpu:8."
        )
    _check_numbers(args)
    prepare_environment(args.topology)
    from jtrain.distributed.compiler_flags import apply_flags

    resolved = resolve_config(path, words)
    xla = resolved.config.xla
    for line in apply_flags(xla.preset, xla.flags, xla.tpu_flags):
        print_error(line)
    topology = find_topology(args.topology)
    if args.memory is not None:
        topology = topology._replace(limit=int(args.memory * 1e9))
    config: Any = resolved.config
    if args.search:
        return _search(path, config, topology, args)
    if args.largest_batch:
        return _largest_batch(path, config, topology, args)
    return _plan(path, config, topology, args)


def _plan(path: str, config: "RunConfig", topology: Topology, args: Any) -> int:
    from jtrain.inspect.plan.advice import advise, format_advice
    from jtrain.inspect.plan.plan import format_plan, make_plan

    found = make_plan(config, topology, price=args.price)
    advice = [] if found.fits else advise(config, topology, found)
    if args.json:
        values = {"config": path, **found.plain(), "advice": [each._asdict() for each in advice]}
        print(json.dumps(values))
    else:
        print(format_plan(found))
        if not found.fits:
            print(f"\n{format_advice(advice, found)}")
    return DONE if found.fits else NO_FIT


def _search(path: str, config: "RunConfig", topology: Topology, args: Any) -> int:
    from jtrain.inspect.plan.search import format_search, search

    result = search(config, topology, compiles=args.compiles, report=print_error)
    if args.json:
        print(json.dumps({"config": path, "topology": topology.name, **result.plain()}))
    elif result.rows:
        print(format_search(result))
    else:
        print_error("stopped before the first program was compiled; the same command starts again")
    if result.stopped:
        return STOPPED
    return NO_FIT if result.best is None else DONE


def _largest_batch(path: str, config: "RunConfig", topology: Topology, args: Any) -> int:
    from jtrain.inspect.plan.advice import find_largest_batch, format_largest_batch

    found = find_largest_batch(config, topology, compiles=args.compiles, report=print_error)
    facts = {"config": path, "topology": topology.name, **found.plain()}
    print(json.dumps(facts) if args.json else format_largest_batch(found))
    return DONE if found.batch else NO_FIT


def _arguments() -> Arguments:
    parser = Arguments(
        "plan",
        "Compile the exact step of `jtrain run` for devices that are not here, and print its cost\n"
        "on each: memory, traffic between devices, an estimate of its time. Nothing is trained.\n"
        "TPUs need their compiler: pip install 'jtrain[plan]'; GPUs: 'jtrain[plan-gpu]'.\n"
        "Exit code: 0 the step fits, 1 it does not, 2 an error in what was typed, 75 stopped.",
        "configs/llama2_7b.yaml --topology v5e:4x4                   a slice of 16 chips",
        "configs/llama2_7b.yaml --topology v5e:4x4 --search          the fastest layout that fits",
        "configs/gpt2.yaml --topology 2*v5e:4x4 parallel.kind=fsdp   two slices",
        "configs/shakespeare.yaml --topology cpu:8                   eight parts of this CPU",
    )
    parser.add_config()
    shape = "the devices: v5e:4x4, 2*v5p:4x4x4, h100:8, 2*h200:8, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=shape)
    words = "memory of a device in GB, in the place of the chip's"
    parser.add_argument("--memory", metavar="GB", type=float, help=words)
    words = "dollars for an hour of a device: the plan has the cost of the run"
    parser.add_argument("--price", metavar="DOLLARS", type=float, help=words)
    words = "compare layouts, microbatches, recomputation and offload; print those compiled, ranked"
    parser.add_argument("--search", action="store_true", help=words)
    words = "find the largest batch whose step fits"
    parser.add_argument("--largest-batch", action="store_true", help=words)
    words = "programs that a search compiles at most (12)"
    parser.add_argument("--compiles", metavar="N", type=int, default=12, help=words)
    parser.add_json()
    return parser


def _check_numbers(args: Any) -> None:
    if args.compiles < 1:
        raise UserError(
            f"jtrain plan: --compiles {args.compiles}: a search compiles the config itself and "
            f"those that it compares; write --compiles 12."
        )
    if args.price is not None and (args.search or args.largest_batch):
        raise UserError("jtrain plan: --price is for one plan; leave out what else is asked for.")
    if args.price is not None and not 0 < args.price < math.inf:
        raise UserError(
            f"jtrain plan: --price {args.price:g} is not a price; write dollars for an hour of a "
            f"device: --price 3."
        )
    if args.memory is not None and not 0 < args.memory < math.inf:
        raise UserError(
            f"jtrain plan: --memory {args.memory:g} is not a memory of a device; write it in GB: "
            f"--memory 16."
        )
