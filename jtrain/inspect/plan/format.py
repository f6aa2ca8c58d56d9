"""Plans as text."""

from jtrain.inspect.plan.plan import Plan, collective_table
from jtrain.io.formatting import align_columns, format_count, format_seconds

SHOWN = 10  # tensors in the text


def format_plan(plan: Plan) -> str:
    """Return the plan as text: layout, memory of a device, traffic, work and estimated time."""
    layout = " x ".join(f"{axis} {size}" for axis, size in plan.layout.items())
    how = "from the cache" if plan.cached else "compiled"
    count = f"{plan.devices} of {plan.devices + plan.unused}" if plan.unused else plan.devices
    head = f"{plan.topology}: {count} devices, {layout}; {how} in {plan.seconds:.0f} s"
    notes = [str(note) for note in (_unused(plan), plan.why, plan.schedule) if note]
    parts = [[head, *notes], _memory(plan), _tensors(plan), _collectives(plan), _work(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _unused(plan: Plan) -> str:
    if not plan.unused:
        return ""
    return (
        f"warning: the layout leaves {plan.unused} devices unused; parallel.kind=fsdp "
        f"parallel.devices=0 uses all"
    )


def _memory(plan: Plan) -> list[str]:
    memory, limit = plan.memory, plan.memory["limit"]
    lines = ["memory of a device"]
    rows = {
        "arguments": "the state and a batch; the state's leaves alone are "
        f"{format_bytes(plan.leaves)}",
        "temporaries": "at most at once",
        "output": f"of which {format_bytes(memory['aliased'])} in the buffers of arguments",
        "host": "on the machine, beside the device",
    }
    for key, note in rows.items():
        if memory[key] or key != "host":
            lines.append(f"  {key:12} {format_bytes(memory[key]):>10}   {note}")
        if key == "arguments":
            lines += [
                f"    {part.name:10} {format_bytes(part.bytes):>10}   {part.note}".rstrip()
                for part in plan.parts
                if part.bytes >= plan.leaves / 1000  # not the number of a step
            ]
    share = f"of {format_bytes(limit)}: {_fits(plan.peak, limit)}" if limit else ""
    lines.append(f"  {'in all':12} {format_bytes(plan.peak):>10}   {share}".rstrip())
    return lines


def _tensors(plan: Plan) -> list[str]:
    if not plan.tensors:
        return []
    rows = [
        (
            f"  {format_bytes(each.bytes)}",
            each.role,
            f"{each.arrays} x {each.shape}" if each.arrays > 1 else each.shape,
            " ".join(filter(None, [each.name, each.source and f"({each.source})"])),
        )
        for each in plan.tensors[:SHOWN]
    ]
    return ["largest arrays at the peak", *align_columns(rows, right=(0,))]


def _collectives(plan: Plan) -> list[str]:
    lines = ["sent by each device in a step, loops counted"]
    for row in collective_table(plan.collectives):
        axes = " x ".join(row.axes) or "other"
        beside = f", {row.overlapped / row.sent:.0%} beside computation" if row.sent else ""
        lines.append(f"  {axes:12} {format_bytes(row.sent):>10}   {row.kind}, {row.times}{beside}")
    if not plan.collectives and not plan.unread:
        lines.append("  nothing")
    return lines + [f"  not read: {note}" for note in plan.unread]


def _work(plan: Plan) -> list[str]:
    flops, lines = plan.flops, []
    least = "" if plan.flops_exact else "at least "
    if flops.model:
        again = (
            f", {least}{format_count(flops.hardware)} with recomputation" if flops.hardware else ""
        )
        lines.append(f"FLOPs of a step: {least}{format_count(flops.model)} of the model{again}")
    if not plan.flops_exact:
        lines.append(
            "  warning: the loss has loops whose number of turns depends on data, or kernels that "
            "are not known; a loop counts as one turn and a kernel as nothing"
        )
    found = plan.estimate
    if found is None:
        return [*lines, f"no estimate of the time: figures of {plan.topology} are not known"]
    share = f", MFU {plan.mfu:.0%}" if plan.mfu else ""
    return [
        *lines,
        f"estimate, not a measurement: {format_seconds(found.seconds)} a step{share}; "
        f"{found.bound} takes longest",
        f"  compute {format_seconds(found.compute)}, memory {format_seconds(found.memory)}, "
        f"interconnect {format_seconds(found.links)}, of which the device waits for "
        f"{format_seconds(found.exposed)}",
        "  " + " ".join(filter(None, [f"from {found.chip}", found.source and f"({found.source})"])),
    ]


def format_bytes(count: int) -> str:
    """Format bytes in decimal units, as in the specifications of chips: `5.05 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return (
                f"{count / factor:.2f} {unit}" if count < 1e11 else f"{count / factor:.0f} {unit}"
            )
    return f"{count} B"


def _fits(peak: int, limit: int) -> str:
    if peak <= limit:
        return f"{peak / limit:.0%}, {format_bytes(limit - peak)} free"
    return f"{peak / limit:.0%}, it does not fit"
