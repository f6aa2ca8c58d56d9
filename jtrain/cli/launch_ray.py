"""`jtrain launch --engine ray`: any verb in several processes on the nodes of a Ray cluster."""

import argparse
from collections.abc import Sequence

from jtrain.cli.launch import common_options
from jtrain.distributed.launcher.ray import launch_on_ray


def launch_ray(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the verb; return the exit code of the first process that failed, or of all."""
    return launch_on_ray(
        command,
        processes=(args.least, args.processes),
        address=args.address,
        resources=args.resources,
        variables=args.env,
        wait=args.wait,
        **common_options(args),
    )
