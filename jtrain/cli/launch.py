"""`jtrain launch --processes N VERB ...`: any verb in several processes, here or by an engine."""

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli import VERBS, manifests
from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.distributed.cluster.cluster import LAUNCHER, NUMBER
from jtrain.distributed.launcher import launch
from jtrain.distributed.ray_cluster import (
    check_installed,
    connected,
    forwarded,
    parse_address,
    parse_resources,
    process_resources,
)
from jtrain.distributed.watchdog import Patience
from jtrain.errors import DONE, STOPPED, PeerError, UserError
from jtrain.errors.spelling import did_you_mean

# The options that an engine takes beside --engine and --processes.
ENGINES = {
    "local": {"devices", "port", "restarts", "patience"},
    "ray": {"devices", "restarts", "address", "env", "resources"},
}


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code of the first process that failed, or of all."""
    index = next((i for i, word in enumerate(argv) if word in VERBS), len(argv))
    parser = _arguments()
    args = parser.parse(argv[:index])
    args.verb, *rest = argv[index:] or [""]
    if args.command or args.verb in {"", "launch"}:
        raise UserError(_no_verb(next(iter(args.command), args.verb), args.processes))
    if args.engine in manifests.ENGINES:
        return manifests.print_manifest(args, argv[:index], [args.verb, *rest])
    for name, least in (("processes", 1), ("devices", 0), ("port", 0), ("restarts", 0)):
        if getattr(args, name) < least:
            raise UserError(f"jtrain launch: --{name} is at least {least}; type --{name} 2")
    _check_engine(args, parser)
    manifests.check_no_options(argv[:index], args.engine)
    args.program = shlex.join(["jtrain", "launch", *argv[:index]])
    start = launch_ray if args.engine == "ray" else launch_local
    return start(args, ["-m", "jtrain", args.verb, *rest])


def launch_local(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the verb in processes on this machine."""
    return launch(
        [sys.executable, *command],
        processes=args.processes,
        devices=args.devices,
        port=args.port,
        restarts=args.restarts,
        patience=Patience.parse(args.patience),
        program=args.program,
    )


def _check_engine(args: argparse.Namespace, parser: Arguments) -> None:
    """Raise UserError if there is no such engine, or it does not take an option."""
    if args.engine not in ENGINES:
        names = [*ENGINES, *manifests.ENGINES]
        meant = did_you_mean(args.engine, names) or "."
        raise UserError(
            f"jtrain launch: no engine {args.engine}; the engines are {', '.join(names)}{meant}"
        )
    for name in sorted(set().union(*ENGINES.values()) - ENGINES[args.engine]):
        if getattr(args, name) != parser.get_default(name):
            taker = next(engine for engine, options in ENGINES.items() if name in options)
            raise UserError(
                f"jtrain launch: the engine {args.engine} takes no --{name}; leave it out, or type "
                f"--engine {taker}"
            )


def _no_verb(word: str, processes: int) -> str:
    verbs = [name for name in VERBS if name != "launch"]
    config = word.endswith((".yaml", ".yml"))
    meant = f"; did you mean run {word}?" if config else did_you_mean(word, verbs) or "."
    found = f" {word} is not a verb that launch can run{meant}" if word else ""
    return (
        f"jtrain launch: the verb to run in {processes} processes is missing.{found} Write a verb "
        f"({', '.join(verbs)}): jtrain launch --processes 2 run configs/shakespeare.yaml"
    )


def _arguments() -> Arguments:
    parser = Arguments(
        "launch",
        "Run a verb in several processes on this machine, as several machines would run it: a\n"
        "rehearsal on CPU devices. The processes connect on the loopback only. When one fails or\n"
        "is stuck all are ended, and its output is printed last. With --restarts all are\n"
        "restarted, and a run resumes from its newest valid checkpoint. --engine ray trains\n"
        "by Ray Train on a Ray cluster; --engine k8s and others print a manifest, by which\n"
        "another program starts the processes elsewhere.",
        "--processes 2 --devices 4 run configs/shakespeare.yaml",
        "--processes 4 run configs/shakespeare.yaml parallel.kind=fsdp",
        "--processes 1 --restarts 3 run configs/shakespeare.yaml",
        "--engine ray --processes 4 --restarts 3 run configs/shakespeare.yaml",
        "--engine k8s --topology v5e:4x4 --image IMAGE --claim shared run configs/llama2_7b.yaml",
    )
    words = f"what starts the processes: {', '.join([*ENGINES, *manifests.ENGINES])}; default local"
    parser.add_argument("--engine", default="local", metavar="NAME", help=words)
    words = "number of processes; default 2"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=words)
    words = "CPU devices of each; default one, or the number in the config"
    parser.add_argument("--devices", type=int, default=0, metavar="N", help=words)
    words = "port of the first process on the loopback; default a free port"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=words)
    words = "restarts of all after one failed or was stuck; never after exit code 2"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=words)
    words = "seconds after which a process is stuck: 60 for all phases, or step=60,compile=600"
    parser.add_argument("--patience", default="", metavar="SECONDS", help=words)
    words = "ray: HOST:PORT of the cluster, auto or local; default RAY_ADDRESS, or local"
    parser.add_argument("--address", default="", metavar="ADDRESS", help=words)
    words = "ray: of each process, such as CPU=4,GPU=1; default a CPU, and a GPU if there are any"
    parser.add_argument("--resources", default="", metavar="NAME=N", help=words)
    words = "ray: names of further variables that the processes get from here"
    parser.add_argument("--env", default="", metavar="NAME,NAME", help=words)
    manifests.add_options(parser)
    words = "the verb to run in each, with its arguments"
    parser.add_argument("command", metavar="VERB ...", nargs="*", help=words)
    return parser


def launch_ray(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Train in the workers of a `JaxTrainer`; return the exit code of `jtrain run`.

    Ray Train starts the workers, joins them into one JAX, and restarts them after a failure.
    """
    config, settings = _config_and_settings(args.verb, command[3:])
    check_installed("jtrain launch: --engine ray", "leave --engine out to run on this machine")
    address = parse_address(args.address, os.environ.get("RAY_ADDRESS", ""))
    typed = parse_resources(args.resources)
    environ = {**forwarded(os.environ, args.env), LAUNCHER: args.program}
    if args.devices:
        environ |= {"JAX_PLATFORMS": "cpu", NUMBER: f"{args.devices}"}
    # Ray's 30 s are too few for workers that import JAX on a busy machine.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "120")
    cpus = args.processes * max(1, typed.get("CPU", 1))
    with connected(address, cpus, output=True) as ray:
        needed = process_resources(ray, typed if typed or not args.devices else {"CPU": 1})
        _check_resources(needed, args.processes, args.devices)
        if not {"GPU", "TPU"} & set(needed):
            environ["JAX_PLATFORMS"] = "cpu"
        return fit(_trainer(args, config, settings, needed, environ))


def fit(trainer: Any) -> int:
    """Train; return the exit code: that of the run, where a worker reports one.

    Raises:
        UserError: if a worker raised one.
        PeerError: for a failure after the last restart.
    """
    from jtrain.train.ray import RunEndedError, raise_mistake, worker_error

    failure: type[Exception] = importlib.import_module("ray.train").TrainingFailedError
    try:
        trainer.fit()
    except failure as error:
        if mistake := getattr(error, "controller_failure", None):
            raise_mistake({0: mistake})
        failures = {i: worker_error(e) for i, e in getattr(error, "worker_failures", {}).items()}
        raise_mistake(failures)
        ended = [each for each in failures.values() if isinstance(each, RunEndedError)]
        if ended:
            print(ended[0], file=sys.stderr)
            return ended[0].code
        raise PeerError(f"jtrain launch: {error}") from None
    except (KeyboardInterrupt, SystemExit):  # by Ray's own handlers of SIGINT and SIGTERM
        print("the workers were ended by a signal; the same command resumes", file=sys.stderr)
        return STOPPED
    return DONE


def _trainer(
    args: argparse.Namespace,
    config: str,
    settings: Sequence[str],
    needed: Mapping[str, float],
    environ: Mapping[str, str],
) -> Any:
    from jtrain.train.ray import stop_on_mistake, train_loop

    train, jax = (importlib.import_module(f"ray.train{name}") for name in ("", ".v2.jax"))
    config_class = importlib.import_module("ray.train.v2.jax.config").JaxConfig
    gpu, tpu = "GPU" in needed, "TPU" in needed
    # Newer versions of Ray print each report of each worker otherwise.
    quiet = getattr(train, "LoggingConfig", None)
    log = {"logging_config": quiet(log_level="ERROR")} if quiet else {}
    return jax.JaxTrainer(
        train_loop_per_worker=train_loop,
        train_loop_config={"config": config, "overrides": settings, "directory": os.getcwd()},
        # On CPUs too: without one of the two Ray joins no workers.
        jax_config=config_class(use_gpu=not tpu, use_tpu=tpu),
        scaling_config=train.ScalingConfig(
            num_workers=args.processes, use_gpu=gpu, use_tpu=tpu, resources_per_worker=dict(needed)
        ),
        run_config=train.RunConfig(
            storage_path=str(Path("runs", ".ray").absolute()),
            failure_config=train.FailureConfig(
                max_failures=args.restarts, controller_failure_limit=args.restarts + 1
            ),
            callbacks=[stop_on_mistake()],
            worker_runtime_env={"env_vars": dict(environ)},
            **log,
        ),
    )


def _config_and_settings(verb: str, words: Sequence[str]) -> tuple[str, list[str]]:
    options = [word for word in words if word.startswith("-")]
    if verb != "run" or options:
        raise UserError(
            f"jtrain launch: --engine ray trains a config, found {' '.join([verb, *options])}. "
            f"Type --engine ray run CONFIG KEY=VALUE, or leave --engine out"
        )
    parser = Arguments("launch --engine ray run", "")
    return parser.config_and_words(words)


def _check_resources(needed: Mapping[str, float], processes: int, devices: int) -> None:
    if devices and {"GPU", "TPU"} & set(needed):
        raise UserError(
            f"jtrain launch: --devices {devices} is a number of CPU devices, and --resources gives "
            f"accelerators; leave one of them out: --resources GPU=2 is two GPUs for each process"
        )
    if "TPU" in needed and processes > 1:
        raise UserError(
            "jtrain launch: Ray needs the topology of a TPU slice of several hosts. Write a "
            'JaxTrainer with jt.ray.train_loop and ScalingConfig(use_tpu=True, topology="4x4", '
            'accelerator_type="TPU-V5LITEPOD"), as docs/clusters/ray.md shows'
        )
