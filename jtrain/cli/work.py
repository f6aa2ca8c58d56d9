"""`jtrain work RUN`: add a worker to a running run on parameter servers."""

from collections.abc import Sequence

from jtrain.cli.arguments import Arguments, find_config
from jtrain.cli.output import print_error


def main(argv: Sequence[str]) -> int:
    """Work; return the exit code: 0 the run has ended, 75 this worker was asked to leave."""
    args = _arguments().parse(argv)
    directory = find_config(args.run, "work").parent

    from jtrain.server.process import join, leave_on_signals, read_config
    from jtrain.train.runtime import enable_compilation_cache

    read_config(directory)
    leaving = leave_on_signals()
    enable_compilation_cache()
    return join(directory, wait=args.wait, leaving=leaving, log=print_error)


def _arguments() -> Arguments:
    parser = Arguments(
        "work",
        "Add a worker to a running run of parallel.kind=server, on any machine that sees\n"
        "its directory. The worker leaves after its step at SIGTERM or Ctrl-C, and ends with the\n"
        "run. If the run's own process dies, it waits for the next one.",
        "digits",
        "/shared/project/runs/gpt2 --wait 3600",
    )
    parser.add_run()
    words = "seconds to wait for the run's own process (600)"
    parser.add_argument("--wait", metavar="SECONDS", type=float, default=600.0, help=words)
    return parser
