"""Check of the connection of the devices: an all-reduce is exact, and how fast it is."""

from collections.abc import Iterator

from jtrain.inspect.doctor.child import ChildResult
from jtrain.inspect.doctor.finding import Finding, error, ok
from jtrain.io.formatting import format_bytes, format_seconds


def check_interconnect(result: ChildResult) -> Iterator[Finding]:
    """Return findings about the all-reduce over all devices.

    Args:
        result: what `probe_devices` reported.
    """
    found, stage = result.reports, result.reports.get("stage")
    if stage == "interconnect":
        last = [line for line in result.errors.splitlines() if line.strip()]
        yield error(
            "interconnect",
            "interconnect-fails",
            f"a sum over {len(found['devices'])} devices {result.ending}"
            f"{': ' + last[-1].strip()[:300] if last else ''}",
            "NCCL_DEBUG=INFO jtrain doctor --only interconnect",
        )
        return
    if "interconnect" not in found:
        if stage == "end":
            yield ok("interconnect", "one device, nothing to connect")
        return
    reduced = found["interconnect"]
    processes = reduced["processes"]
    among = f" of {processes} processes" if processes > 1 else ""
    if reduced["wrong"]:
        yield error(
            "interconnect",
            "interconnect-wrong",
            f"a sum over {reduced['devices']} devices{among} is wrong on device "
            f"{', '.join(map(str, reduced['wrong']))}: a link or a device is faulty",
            "parallel.devices=[...] without that device, and ask for another machine",
        )
        return
    yield ok(
        "interconnect",
        f"a sum of {format_bytes(reduced['bytes'])} over {reduced['devices']} devices{among} is "
        f"exact and takes {format_seconds(reduced['seconds'])}: "
        f"{format_bytes(round(reduced['bytes_per_second']))}/s each",
    )
