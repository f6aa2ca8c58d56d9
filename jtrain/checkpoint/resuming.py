"""Where a run goes on: the newest checkpoint of which every byte is what was sealed."""

from pathlib import Path

from jtrain import all_processes
from jtrain.checkpoint import folder


def newest_whole(directory: Path) -> tuple[int | None, list[str]]:
    """That step, and a line for each newer one that was damaged and set aside.

    The first process reads and renames; the others are told, and have no lines.
    """
    news: list[str] = []
    found = all_processes.of_first(lambda: {"step": _search(directory, news)})
    return found["step"], news


def _search(directory: Path, news: list[str]) -> int | None:
    for step in reversed(folder.named(directory)):
        found = folder.faults(directory, step, full=True)
        if not found:
            return step
        place = folder.set_aside(directory, step)
        news.append(
            f"checkpoint {step} is damaged and was set aside as {place}: {folder.first(found)}"
        )
    return None
