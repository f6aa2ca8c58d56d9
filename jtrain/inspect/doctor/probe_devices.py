"""Child process that starts JAX's devices."""

import logging
import os
import time
from typing import Any

from jtrain.inspect.doctor.child import Reporter

REPORTED = 1.0  # seconds before the end of this process in which it reports who is missing


def main(given: dict[str, Any], file: str) -> None:
    """Report, in this order: the version of JAX, the cluster, the devices."""
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
    report(stage="end")
    if given["join"]:
        os._exit(0)  # JAX's shutdown waits for processes that may have failed


def _join(report: Reporter, given: dict[str, Any]) -> None:
    """Join the processes of the cluster."""
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
    all_gather(0)  # the end of process 0 would end those that are still on their way
    report(processes=jax.process_count())


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
