"""Child process that starts JAX's devices and sums over them."""

import importlib
import logging
import os
import time
from typing import Any

from jtrain.inspect.doctor.child import Reporter

REPORTED = 1.0  # seconds before the end of this process in which it reports who is missing
SMALL, LARGE = 1 << 22, 1 << 26  # bytes of the all-reduce on a CPU, and on an accelerator


def main(given: dict[str, Any], file: str) -> None:
    """Report, in this order: the version of JAX, the cluster, the devices, an all-reduce."""
    report = Reporter(file, given["timeout"])
    report(stage="import")
    messages = _collect_messages()
    begun = time.perf_counter()
    import jax

    report(jax=jax.__version__, jax_file=jax.__file__, import_seconds=time.perf_counter() - begun)
    if given["join"]:
        report(stage="join")
        _join(report, given)
    report(stage="devices")
    begun = time.perf_counter()
    try:
        devices = jax.devices()
    finally:
        report(messages=messages)
    report(
        devices=[{"platform": d.platform, "id": d.id, "kind": d.device_kind} for d in devices],
        device_seconds=time.perf_counter() - begun,
        chosen=jax.config.jax_platforms or "",  # pyright: ignore[reportAttributeAccessIssue]
    )
    if len(devices) > 1 and given["interconnect"]:
        report(stage="interconnect")
        interconnect = importlib.import_module("jtrain.parallel.interconnect")
        found = interconnect.measure_all_reduce(SMALL if devices[0].platform == "cpu" else LARGE)
        report(
            interconnect={
                "devices": found.devices,
                "processes": jax.process_count(),
                "bytes": found.num_bytes,
                "seconds": found.seconds,
                "bytes_per_second": found.bytes_per_second,
                "wrong": list(found.wrong),
            }
        )
    report(stage="end")
    if given["join"]:
        os._exit(0)  # JAX's shutdown waits for processes that may have failed


def _join(report: Reporter, given: dict[str, Any]) -> None:
    """Join the processes of the cluster, and report how far their clocks are apart."""
    import jax

    from jtrain.distributed.cluster import detect, start
    from jtrain.distributed.multihost import all_gather

    cluster = detect(os.environ)
    try:
        left = given["begun"] + given["timeout"] - time.monotonic() - REPORTED
        start(cluster, given["facts"], timeout=max(left, 1))
    except Exception as error:
        report(join_error=str(error))
        raise
    all_gather(0)  # compiles, and lets all arrive
    times = all_gather(time.time())
    report(clock_skew=max(times) - min(times), processes=jax.process_count())


def _collect_messages() -> list[str]:
    """Return a list into which JAX's messages about backends go: why a plugin did not start."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += f" {record.exc_info[1]}"
            messages.append(text)

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.setLevel(logging.INFO)
    logger.addHandler(Collector())
    return messages
