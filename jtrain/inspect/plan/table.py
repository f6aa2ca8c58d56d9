"""A plan as text."""

from jtrain.inspect.plan.collectives import sum_by_axes
from jtrain.inspect.plan.plan import Plan


def format_plan(plan: Plan) -> str:
    """Return the plan as text: layout, memory of a device, bytes that it sends in a step."""
    layout = " x ".join(f"{axis} {size}" for axis, size in plan.layout.items())
    lines = [f"{plan.topology}: {plan.devices} devices, {layout}; compiled in {plan.seconds:.0f} s"]
    lines += [str(note) for note in (plan.why, plan.schedule) if note]
    memory, limit = plan.memory, plan.memory["limit"]
    lines += ["", "memory of a device"]
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
    share = f"of {format_bytes(limit)}: {_fits(plan.peak, limit)}" if limit else ""
    lines.append(f"  {'in all':12} {format_bytes(plan.peak):>10}   {share}".rstrip())
    lines += ["", "sent by each device in a step, loops counted"]
    for axes, kinds in sum_by_axes(plan.collectives).items():
        for kind, count in sorted(kinds.items(), key=lambda item: -item[1]):
            lines.append(f"  {axes:12} {format_bytes(count):>10}   {kind}")
    if not plan.collectives and not plan.unread:
        lines.append("  nothing")
    lines += [f"  not read: {note}" for note in plan.unread]
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """Format bytes in decimal units, as in the specifications of chips: `5.05 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return (
                f"{count / factor:.2f} {unit}" if count < 1e11 else f"{count / factor:.0f} {unit}"
            )
    return f"{count} B"


def _fits(peak: int, limit: int) -> str:
    return f"{peak / limit:.0%}" + ("" if peak <= limit else ", it does not fit")
