"""Run record: the facts about a run in run.json, and their copy in each checkpoint.

run.json is a single file that may be lost or truncated. The facts that a run needs (its id, its
values, its data) are therefore sealed into each checkpoint too, under `identity`; if run.json lacks
one, the newest checkpoint has it.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.checkpoint import layout, seal
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.top import RUNS
from jtrain.errors import CheckpointError, ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.disk_errors import attempt
from jtrain.io.environment import in_runs, is_run
from jtrain.io.object_store import check_local_run
from jtrain.io.regular_files import read_json

RUN_JSON, IDENTITY = "run.json", "identity"
MAX_BYTES = 1 << 24  # of a run.json


class RunRecord(NamedTuple):
    """Readable content of a run.json."""

    facts: dict[str, Any]
    trouble: str
    """Problem with the file; empty if it is fine or missing."""


class CheckpointRecord(NamedTuple):
    """Facts about a run in its newest readable checkpoint."""

    step: int
    facts: dict[str, Any]
    """As in run.json."""
    values: Any
    """Config as it was given."""


def read_record(path: Path) -> RunRecord:
    """Return the content of a run.json, without facts of a wrong type.

    Raises:
        UnreachableError: if it is there and cannot be read now.
    """
    try:
        found = attempt(path, lambda: read_json(path, most=MAX_BYTES, inside=path.parent))
    except FileNotFoundError:
        return RunRecord({}, "")
    except NotADirectoryError:
        return RunRecord({}, "")
    except OSError as error:
        return RunRecord({}, f"cannot be read ({error.strerror})")
    except ValueError as error:
        return RunRecord({}, f"is no JSON ({error})")
    if not isinstance(found, dict):
        return RunRecord({}, f"is no JSON object ({type(found).__name__})")
    if not found:
        return RunRecord({}, "is empty")
    facts = _typed(found)
    lost = [name for name in found if name not in facts]
    lost += [name for name in ("status", "step") if name not in found]
    return RunRecord(facts, f"has no usable {', '.join(lost)}" if lost else "")


def read_newest_checkpoint(checkpoints: Path, owner: RunIdentity | None) -> CheckpointRecord | None:
    """Return the record of a run's newest checkpoint with a readable one."""
    for step in reversed(layout.list_named_steps(checkpoints)):
        if layout.is_foreign(checkpoints, step, owner):
            continue
        try:
            about = layout.read_record(checkpoints, step)["about"]
        except CheckpointError:  # damaged, or deleted in the meantime
            continue
        identity = about.get(IDENTITY)
        if isinstance(identity, dict) and "config" in identity:
            facts = _typed({"data": about.get("data"), **identity})
            return CheckpointRecord(step, facts, identity["config"])
    return None


def find_facts(path: Path) -> dict[str, Any]:
    """Return the facts about the run in a directory, from run.json or the newest checkpoint."""
    found = read_record(path / RUN_JSON).facts
    if "id" in found:
        return found
    sealed = read_newest_checkpoint(path / "checkpoints", None)
    return {**sealed.facts, **found} if sealed else found


def find_owner(path: Path) -> RunIdentity | None:
    """Return the run that owns the checkpoints in a directory; None if no file has an id.

    Raises:
        ConfigError: if run.json has no id, and the checkpoints are of several runs.
    """
    known = get_owner(read_record(path / RUN_JSON).facts)
    if known is not None:
        return known
    checkpoints = path / "checkpoints"
    sealed = {
        step: run
        for step in layout.list_named_steps(checkpoints)
        if (run := seal.sealed_run(checkpoints / str(step)))
    }
    steps = list(sealed)
    candidates = {}
    for step in reversed(steps):
        owner = RunIdentity(sealed[step], _ancestors(checkpoints, step))
        if all(owner.owns(sealed[other], other) for other in steps):
            return owner
        candidates.setdefault(owner.run, []).append(step)
    if not candidates:
        return None
    lines = [f"  {run}: {', '.join(map(str, of))}" for run, of in candidates.items()]
    first = checkpoints / str(steps[-1])
    raise ConfigError(
        f"{path / RUN_JSON} does not say which run this is, and the checkpoints beside it are of "
        f"several:\n" + "\n".join(lines) + f"\nMove the checkpoints of the other runs away, and "
        f"repeat the command. For example: mv {first} {path}-{first.name}"
    )


def get_owner(facts: Mapping[str, Any]) -> RunIdentity | None:
    """Return the owner of the checkpoints of a run with these facts; None if it has no id."""
    return RunIdentity(facts["id"], facts.get("ancestors", {})) if "id" in facts else None


def draw_identity(path: Path) -> dict[str, Any]:
    """Return the id of the run in a directory, new for a new run, and the ids it was copied from.

    A directory with another name than the run had is another run: a copy, which resumes from the
    copied checkpoints. The place is the last two names of the path, so that the folder of all runs
    may be moved.

    Raises:
        ConfigError: as `find_owner`.
    """
    facts, owner = find_facts(path), find_owner(path)
    place = os.sep.join(path.absolute().parts[-2:])
    new = {"id": str(uuid.uuid4()), "ancestors": {}, "place": place}
    if owner is None:
        return new
    if facts.get("place", place) == place:
        return {"id": owner.run, "ancestors": dict(owner.ancestors), "place": place}
    checkpoints = path / "checkpoints"
    copied = [
        s
        for s in layout.list_named_steps(checkpoints)
        if not layout.is_foreign(checkpoints, s, owner)
    ]
    ancestors = {**owner.ancestors, **({owner.run: copied[-1]} if copied else {})}
    return {**new, "ancestors": ancestors}


def _ancestors(checkpoints: Path, step: int) -> dict[str, int]:
    try:
        identity = layout.read_record(checkpoints, step)["about"].get(IDENTITY)
    except CheckpointError:
        return {}
    return _typed(identity).get("ancestors", {}) if isinstance(identity, dict) else {}


def _typed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts without those that have a type in `_TYPES` and another value."""
    return {name: x for name, x in found.items() if name not in _TYPES or _TYPES[name](x)}


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _is_seconds(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1e12


def _is_id(x: Any) -> bool:
    return isinstance(x, str) and 0 < len(x) <= 100


def _are_texts(x: Any) -> bool:
    return isinstance(x, list) and all(map(_is_text, x))


def _are_named_texts(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_is_text, x.values()))


def _are_ancestors(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_is_count, x.values()))


def _are_readers(x: Any) -> bool:
    pair = lambda each: isinstance(each, list) and len(each) == 2 and all(map(_is_count, each))
    return isinstance(x, list) and all(map(pair, x))


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "status": _is_text,
    "step": _is_count,
    "why": _is_text,
    "id": _is_id,
    "ancestors": _are_ancestors,
    "place": _is_text,
    "readers": _are_readers,
    "sets": _are_texts,
    "data": _is_text,
    "tokenizer": _is_text,
    "code": _are_named_texts,
    "devices": _are_texts,
    "seconds_per_step": _is_seconds,
    "seconds_per_save": _is_seconds,
}


def find_run(run: Path | str, asked: str) -> Path:
    """Return the directory of a run, by its path or by its name in runs/.

    Args:
        asked: name of the caller, for the message.

    Raises:
        ConfigError: if there is no such run, with the existing ones.
    """
    check_local_run(run, asked)
    for directory in (Path(run), RUNS / run):
        # Elsewhere a config.yaml alone may be a study's, whose experiments/ are its code.
        named = in_runs(os.path.abspath(directory)) and (directory / "config.yaml").is_file()
        if named or is_run(directory):
            return directory
    names = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    raise ConfigError(
        f"{asked}: {run} is no directory of a run; in {RUNS}/ there is "
        f"{', '.join(names) or 'none: train one by jtrain run CONFIG'}"
        f"{did_you_mean(Path(run).name, names)}"
    )
