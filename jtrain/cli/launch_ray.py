"""`jtrain launch --engine ray run CONFIG`: train a config by Ray Train, on a Ray cluster."""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.distributed.cluster.cluster import LAUNCHER, NUMBER
from jtrain.distributed.ray_cluster import (
    check_installed,
    connected,
    forwarded,
    parse_address,
    parse_resources,
    process_resources,
)
from jtrain.errors import DONE, STOPPED, PeerError, UserError


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
