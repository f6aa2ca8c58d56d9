"""Moved names: the import to write today for a name of jtrain that is elsewhere."""

import ast
import functools
import linecache
import re
import textwrap
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# What is called otherwise today; what only moved is found by its name. Modules, by their old path.
MODULES = {
    "assemble": "train.setup",
    "cache": "train.compilation_cache",
    "directory": "train.run_dir",
    "fitted": "train.fit_result",
    "given": "train.fit_arguments",
    "guard": "core.finite",
    "launch": "distributed.launcher",
    "load_run": "train.loaded_run",
    "precision": "config.precision",
    "terms": "core.loss",
    "trees": "core.pytree",
    "user_errors": "errors.user_code",
    "values": "config.configclass",
    "writing": "train.complete_text",
    "data.sharing": "data.batches.file_sharding",
    "data.whole": "data.batches.by_step",
    "data.without": "data.batches.skip",
    "hooks.evaluating": "train.hooks.evaluation",
    "hooks.finite": "train.hooks.skipped_steps",
    "hooks.plain": "train.hooks.function_hooks",
    "hooks.recording": "train.hooks.step_record",
    "hooks.saving": "train.hooks.checkpointing",
    "hooks.twice": "train.hooks.recompute_check",
    "parallel.by_hand": "parallel.custom_loop",
}
# Functions and classes: the old name and today's, by the first part of the old path.
NAMES = {
    "": "values:configclass many:scan_steps",
    "values": "values:configclass",
    "types": "Anywhere:Unplaced Once:FiniteBatches",
    "loop": "Ended:LoopResult train:train_loop",
    "terms": "in_terms:normalize_loss",
    "trees": "elements:num_elements",
    "guard": "Taken:UpdateResult take_if:update_if",
    "durations": "Lasts:DurationField",
    "precision": "computed_in:compute_in narrowed:cast_params",
    "assemble": "Assembly:TrainSetup assemble:set_up",
    "directory": "Directory:RunDir",
    "config": "Checks:ChecksConfig Checkpoint:CheckpointConfig Evaluate:EvaluateConfig "
    "Log:LogConfig Top:BaseConfig Rollback:RollbackPolicy Skip:SkipPolicy Stop:StopPolicy",
    "hooks": "Evaluate:EvaluateEvery Finite:SkippedSteps History:MetricHistory "
    "Judge:EvaluationListener Lines:LogLines Log:LogHook Metrics:MetricsFile Pace:SpeedReading "
    "Progress:ProgressBar Result:EvaluationResult Save:SaveEvery",
    "trackers": "About:TrackedRun Opens:TrackerBackend Writer:TrackerRun",
    "data": "Labelled:ImageDataset Loaded:LoaderBatches Mixed:MixedBatches Shared:ShardedStream "
    "ByBytes:ByteTokens ByCharacters:CharacterTokens ByPairs:BytePairTokens "
    "FromFile:PretrainedTokenizer Whole:FullBatches Without:SkipBatches Sharing:FileShard "
    "Random:UniformTokens keep_back:hold_out line_rows:make_line_rows",
    "models": "replaced:mean_of_slices",
    "optim": "Evaluated:WithEvalParams Group:ParamGroup Linear:LinearSchedule Piece:SchedulePiece "
    "Recipe:OptimizerConfig",
    "parallel": "Decision:LeafSharding Needs:MemoryNeeds Schedule:PipelineSchedule "
    "per_device:run_per_device",
    "checkpoint": "Checkpoints:CheckpointManager Retries:SaveRetries Start:WeightsPlan "
    "starting:plan_weights",
    "testing": "Report:CheckReport subject:build_case placed:place_loss",
}
_ATTRIBUTE = re.compile(r"module '(jtrain[\w.]*)' has no attribute '(\w+)'")


def rename_advice(error: BaseException) -> str | None:
    """Return what to write for a name of jtrain that moved; None for every other error."""
    if isinstance(error, AttributeError):
        found = _ATTRIBUTE.search(str(error))
        path = f"{found[1]}.{found[2]}" if found else ""
        moved = path and (_renamed(path) or _find_module(path))
        return f"{path} is called {moved} now." if moved else None
    if isinstance(error, ImportError):
        statement = _failed_import(error)
        lines = _rewritten(statement) if statement else _module_line(error.name)
        if lines:
            return "Names of jtrain have moved. Write:\n" + textwrap.indent(
                "\n".join(lines), "    "
            )
    return None


def new_path(path: str) -> str | None:
    """Return the path of a module or name today; None if it did not move, or is unknown."""
    module, _, name = path.rpartition(".")
    if not module.startswith("jtrain") or _source(path) or name in _defined(module):
        return None
    return _renamed(path) or _find_module(path) or _find_name(module, name)


def _renamed(path: str) -> str | None:
    """Return the path of a module or name that is called otherwise today."""
    _, *inner, name = path.split(".")
    if new := MODULES.get(".".join([*inner, name])):
        return f"jtrain.{new}"
    names = dict(pair.split(":") for pair in NAMES.get(inner[0] if inner else "", "").split())
    return _find_name(path, names[name]) if name in names else None


def _find_module(path: str) -> str | None:
    """Return the module that has the file name of an old one, if no other has it there too."""
    _, *inner, name = path.split(".")
    found = [module for module in _modules() if module.rpartition(".")[2] == name]
    near = [module for module in found if inner and f".{inner[0]}." in module] or found
    return near[0] if len(near) == 1 else None


def _find_name(old: str, name: str) -> str | None:
    """Return the shortest path of a function, class or alias, best in the old package."""
    package = old.split(".")[1] if "." in old else ""
    found = [module for module in _modules() if name in _defined(module)]
    best = min(
        found,
        key=lambda module: (
            module != "jtrain" and package not in module.split("."),
            module.count("."),
        ),
        default=None,
    )
    return f"{best}.{name}" if best else None


@functools.cache
def _modules() -> list[str]:
    files = [file.relative_to(PACKAGE.parent) for file in sorted(PACKAGE.rglob("*.py"))]
    paths = [file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files]
    return [".".join(path.parts) for path in paths]


def _source(module: str) -> Path | None:
    stem = PACKAGE.parent / module.replace(".", "/")
    files = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def _defined(module: str) -> set[str]:
    """Return the names that a module defines or exports, without importing it."""
    file = _source(module)
    text = file.read_text("utf-8") if file else ""
    defined = re.findall(r"^(?:def|class) (\w+)|^(\w+)(?:: TypeAlias)? =", text, re.MULTILINE)
    exported = re.findall(r"import (\w+) as (\w+)$", text, re.MULTILINE)
    listed = re.findall(r'^    "(\w+)",$', text.partition("__all__ = [")[2], re.MULTILINE)
    return {a or b for a, b in defined} | {a for a, b in exported if a == b} | {*listed}


def _failed_import(error: BaseException) -> ast.Import | ast.ImportFrom | None:
    """Return the last import of jtrain in the traceback, parsed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
        source = "".join(linecache.getline(frame.filename, n) for n in range(first, last + 1))
        try:
            (statement,) = ast.parse(textwrap.dedent(source)).body
        except (SyntaxError, ValueError):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and "jtrain" in source:
            return statement
    return None


def _rewritten(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the lines that import the same names from where they are today; [] if none moved."""
    if isinstance(statement, ast.Import):
        moved = [(alias, new_path(alias.name)) for alias in statement.names]
        lines = [f"import {path or alias.name}" + _bound(alias.asname) for alias, path in moved]
        return lines if any(path for _, path in moved) else []
    by_module: dict[str, list[str]] = {}
    changed = False
    for alias in statement.names:
        path = new_path(f"{statement.module}.{alias.name}")
        changed = changed or path is not None
        module, _, name = (path or f"{statement.module}.{alias.name}").rpartition(".")
        bound = alias.asname or alias.name
        by_module.setdefault(module, []).append(name + _bound(bound if bound != name else None))
    if not changed:
        return []
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]


def _bound(name: str | None) -> str:
    return f" as {name}" if name else ""


def _module_line(module: str | None) -> list[str]:
    path = new_path(module or "")
    return [f"import {path}  # was {module}"] if path else []
