"""Scoreboard: the table of the trials and their results, and its place in a page."""

import os
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path

from chaos.results import Result, Results, spans
from chaos.rows import Row

END_OF_DETAIL = 100  # characters shown of each end of a detail
BEGIN, END = "<!-- scoreboard -->", "<!-- end of the scoreboard -->"


def write(page: Path, rows: Mapping[str, Row], results: Results, folder: Path) -> None:
    """Replace the table in `page`; the rest of the page is unchanged."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest, f"{page} has no line {BEGIN}"
    page.write_text(f"{before}{BEGIN}\n{table(rows, results, folder)}\n{END}{after}")


def table(rows: Mapping[str, Row], results: Results, folder: Path) -> str:
    """Format Markdown: a line for each row, the versions, then each failure."""
    lines = ["| | held | plain Orbax/JAX | seconds a trial | seeds |", "|---|---|---|---:|---|"]
    failures: list[str] = []
    for name, row in rows.items():
        found = results.of(name)
        last = [of_seed[-1] for of_seed in found.values()]
        held = sum(each.trial.passed for each in last) * row.faults
        done, planned = len(last) * row.faults, row.count(folder / name) * row.faults
        score = (
            f"{held} of {done}" if done >= planned else f"{held} of {done} so far (of {planned})"
        )
        score = score if last else f"not run yet (of {planned})"
        middle = f"{statistics.median(each.trial.seconds for each in last):.1f}" if last else "-"
        lines.append(
            f"| {row.promise} (`{name}`) | {score} | {row.plain or '-'} | {middle} | "
            f"{spans(found) or '-'} |"
        )
        failures += [line.replace(str(folder), "FOLDER") for line in _failures(name, found)]
    words = sorted({each.versions for each in results.all})
    dates = sorted({each.date for each in results.all})
    lines += ["", f"{_between(dates)}; {_machine()}; {'; '.join(words)}."]
    lines += ["", "All failures so far:" if failures else "Failures: none."]
    return "\n".join([*lines, *([""] if failures else []), *failures])


def _failures(name: str, found: Mapping[int, list[Result]]) -> list[str]:
    """Return a line for the mended failures and one for the others, if there are any."""
    lines = []
    for mended in (True, False):
        failed = {
            seed: next(each for each in reversed(of_seed) if not each.trial.passed)
            for seed, of_seed in sorted(found.items())
            if of_seed[-1].trial.passed == mended and not all(each.trial.passed for each in of_seed)
        }
        if failed:
            seeds = f"seed{'s' * (len(failed) > 1)} {spans(failed)}"
            dates = _between(sorted({each.date for each in failed.values()}))
            state = "fixed since" if mended else f"not fixed: {_detail(failed)}"
            lines.append(f"- `{name}` {seeds}, {dates}, {state}")
    return lines


def _detail(failed: Mapping[int, Result]) -> str:
    """Return what the last of the seeds said, without its middle."""
    detail = " ".join(failed[max(failed)].trial.detail.split()).replace("|", "\\|")
    if len(detail) > 2 * END_OF_DETAIL:
        detail = f"{detail[:END_OF_DETAIL]} ... {detail[-END_OF_DETAIL:]}"
    return detail


def _between(dates: list[str]) -> str:
    if not dates:
        return "Nothing was done yet"
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
