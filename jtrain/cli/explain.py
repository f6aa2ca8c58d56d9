"""`jtrain explain CONFIG`: what a step computes, saves and sends, by module."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_error, resolve_config
from jtrain.cli.output import print_text as print
from jtrain.errors import UserError
from jtrain.inspect.plan.topology import prepare_environment

if TYPE_CHECKING:
    from jtrain.config.resolve import ResolvedConfig
    from jtrain.inspect.plan.topology import Topology
    from jtrain.train.program import Program


def main(argv: Sequence[str]) -> int:
    """Trace, compile and print; return the exit code."""
    parser = _arguments()
    args = parser.parse(argv)
    path, words = parser.config_and_words(args.words)
    _check_options(args)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # nothing is allocated
    if args.topology:
        prepare_environment(args.topology)
    start = time.perf_counter()
    from jtrain.distributed.compiler_flags import apply_flags

    resolved = resolve_config(path, words)
    xla = resolved.config.xla
    for line in apply_flags(xla.preset, xla.flags, xla.tpu_flags):
        print_error(line)
    from jtrain.inspect.plan.topology import find_topology

    topology = find_topology(args.topology) if args.topology else None
    return _explain(args, _set_up(resolved, words, topology), topology, start)


def _explain(
    args: argparse.Namespace, program: "Program", topology: "Topology | None", start: float
) -> int:
    from jtrain.inspect.explain.explain import explain, format_explanation
    from jtrain.inspect.explain.modules import select_modules

    compiles = args.hlo or not (args.no_compile or args.jaxpr or args.module)
    found, jaxpr, hlo = explain(program, compiles=compiles, start=start, topology=topology)
    if args.jaxpr:
        print(jaxpr)
    elif args.hlo:
        print(hlo)
    else:
        selected = select_modules(found.modules, args.module) if args.module else found.modules
        if args.json:
            shown = {**found.plain(), "modules": selected.plain()}
            print(json.dumps(shown))
        else:
            print(format_explanation(found, selected, everything=args.all))
    return 0


def _set_up(resolved: "ResolvedConfig", words: list[str], topology: "Topology | None") -> "Program":
    """Set up the config for these devices or those of a topology."""
    from jtrain.config.resolve import resolve
    from jtrain.inspect.plan.plan import single_step
    from jtrain.train.program import set_up

    devices = topology.devices if topology else None
    program = set_up(single_step(resolved.config), among=devices)
    kernel = getattr(getattr(resolved.config, "model", None), "attention", "")
    platform = program.resolved.devices[0].platform
    needs: str = {"splash": "tpu", "cudnn": "gpu"}.get(kernel) or platform
    if needs == platform or any(word.startswith("model.attention=") for word in words):
        return program
    itself = " For the kernel: --topology v5e:4x4 (pip install 'jtrain[plan]')."
    print(
        f"model.attention={kernel} is a kernel for {needs.upper()}s, and these are devices of "
        f"{platform}: explained with model.attention=xla.{itself if needs == 'tpu' else ''}",
        file=sys.stderr,
    )
    plain = resolve(resolved.path, [*words, "model.attention=xla"])
    return set_up(single_step(plain.config), among=devices)


def _check_options(args: argparse.Namespace) -> None:
    """Raise if two options ask for different texts."""
    if args.jaxpr and args.hlo:
        raise UserError("jtrain explain: --jaxpr and --hlo exclude each other; type one of them")
    if args.no_compile and args.hlo:
        raise UserError(
            "jtrain explain: --hlo is the compiled program; leave out --no-compile to print it"
        )


def _arguments() -> Arguments:
    parser = Arguments(
        "explain",
        "Print what a step of a config computes, by module: FLOPs and bytes of the loss and its\n"
        "gradient, what autodiff saves for the backward pass, what is computed again, and the\n"
        "memory and collectives of the compiled program. Nothing is allocated or trained.",
        "configs/shakespeare.yaml                       as tables",
        "configs/shakespeare.yaml --module blocks/qkv   one module",
        "configs/llama2_7b.yaml --topology v5e:4x4      on devices that are not here",
    )
    parser.add_config()
    words = "only this module, such as blocks/qkv"
    parser.add_argument("--module", metavar="NAME", default="", help=words)
    parser.add_argument("--all", action="store_true", help="print small entries and long tables")
    words = "print the traced programs of the loss and its gradient"
    parser.add_argument("--jaxpr", action="store_true", help=words)
    parser.add_argument("--hlo", action="store_true", help="print the compiled program of the step")
    words = "leave out the compiled program: its memory and collectives"
    parser.add_argument("--no-compile", action="store_true", help=words)
    words = "devices in the place of those of this machine: v5e:4x4, cpu:8"
    parser.add_argument("--topology", metavar="KIND:SHAPE", default="", help=words)
    parser.add_json()
    return parser
