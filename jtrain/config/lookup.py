"""Lookup of an experiment by its plain name, and its import."""

import importlib
import os
import shlex
import sys
import traceback
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jtrain.config.configclass import is_configclass
from jtrain.config.registry import entry_points_of
from jtrain.config.top import BaseConfig
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.environment import in_runs, is_run

_JTRAIN = Path(__file__).parents[1]
YAML = (".yaml", ".yml")


def shipped_folder(folder: str) -> Path | None:
    """Return the directory of jtrain's own `experiments` or `configs`; None if it is missing."""
    clone = _JTRAIN.parent
    if (_JTRAIN / "shipped" / folder).is_dir():
        return _JTRAIN / "shipped" / folder
    is_clone = (clone / "pyproject.toml").is_file() and (clone / folder).is_dir()
    return clone / folder if is_clone else None


def shipped_configs() -> dict[str, Path]:
    """Return the path of each config that comes with jtrain, by its name."""
    directory = shipped_folder("configs")
    return {} if directory is None else {p.stem: p for p in sorted(directory.glob("*.yaml"))}


def shipped_experiments() -> list[str]:
    """Return the names of the experiments that come with jtrain."""
    return list(_local(shipped_folder(PACKAGE)))


def find_config(typed: Path | str) -> Path:
    """Return the file that `typed` names: itself, or one of jtrain's own if there is no such file.

    jtrain's own are named plainly (`digits`), or as in the clone (`configs/digits.yaml`).
    """
    path = Path(typed)
    plain = path.parent in {Path(), Path("configs")} and path.suffix in {"", *YAML}
    if not plain or path.is_absolute() or path.exists() or (path.suffix == "" and path.parent.name):
        return path
    return shipped_configs().get(path.stem, path)


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE, GROUP = "experiments", "jtrain.experiments"
FIT = "fit"  # experiment name of a run that `jt.fit` made


@dataclass(frozen=True)
class FoundExperiment:
    """Experiment that was found and not yet imported."""

    name: str
    where: "Path | EntryPoint"
    beside: Path | None = None
    """The `experiments` that is nearest to the config, whatever else is found."""


def find_experiment(name: str, config: Path) -> FoundExperiment:
    """Return the experiment with a name, searched from the place of a config.

    Raises:
        ConfigError: if there is none, with a list of the experiments that exist.
    """
    directory, skipped = _directories(config)
    if ":" in name:
        from importlib.metadata import EntryPoint

        return FoundExperiment(name, EntryPoint(name, name, GROUP), directory)
    for beside in (directory, shipped_folder(PACKAGE)):
        if name in (own := _local(beside)):
            return FoundExperiment(name, own[name], directory)
    others = entry_points_of(PACKAGE)
    if name in others:
        return FoundExperiment(name, others[name], directory)
    if name == FIT and (config.parent / "run.json").exists():
        raise ConfigError(
            f"jt.fit made this run, and the loss and the data are in its script. Repeat that call "
            f"to resume or evaluate the run; jt.load({str(config.parent)!r}) reads its parameters"
        )
    where = f"in {_shown(directory)}" if directory else f"in an {PACKAGE}/ beside or above {config}"
    others = sorted({*_local(directory), *others})
    near = did_you_mean(name, [*others, *_local(shipped_folder(PACKAGE))])
    listed = f"there is {', '.join(others)}" if near and others else describe_available(config)
    how = near or f"; write {PACKAGE}/{name}.py"
    for file in (_local(folder).get(name) for folder in skipped):
        if file is not None:
            copied = file if file.stem == name else file.parent
            how = (
                f"; {file} lies in a run's directory, where no code is run. If you trust it: mkdir "
                f"-p {PACKAGE} && cp -r {shlex.quote(str(copied))} {PACKAGE}/"
            )
    raise ConfigError(f"no experiment {name!r} {where} or installed; {listed}{how}")


def describe_available(config: Path) -> str:
    """Describe the available experiments, searched from the place of a config."""
    others = sorted({*_local(_directories(config)[0]), *entry_points_of(PACKAGE)})
    own = ", ".join(name for name in _local(shipped_folder(PACKAGE)) if name not in others)
    if not others:
        return f"there is none but those that come with jtrain: {own}"
    listed = f"there is {', '.join(others)}"
    return f"{listed}; these come with jtrain: {own}" if own else listed


def load_experiment(found: FoundExperiment) -> type[BaseConfig]:
    """Import an experiment and return its `Config`; it may import modules beside it.

    Raises:
        ConfigError: if it cannot be imported, with the place in it that failed.
    """
    folder = str(found.beside.parent) if found.beside else None
    if folder and folder not in sys.path:
        sys.path.append(folder)  # for the kinds that a config names by their module
    try:
        if isinstance(found.where, Path):
            _show_package(_directory_of(found.where))
            loaded = importlib.import_module(f"{PACKAGE}.{found.name}")
        else:
            loaded = found.where.load()
    except Exception as error:
        advice = _beside_advice(error, found.where)
        raise ConfigError(
            f"experiment {found.name} cannot be imported.\n{_inside(error)}"
            + (f"\n{advice}" if advice else "")
        ) from error
    schema = loaded if isinstance(loaded, type) else getattr(loaded, "Config", None)
    where = found.where if isinstance(found.where, Path) else found.where.value
    if not (is_configclass(schema) and issubclass(schema, BaseConfig)):
        raise ConfigError(
            f"{where}: has no `Config` that is a @configclass dataclass over RunConfig; write\n"
            f"@configclass\nclass Config(RunConfig):\n    ..."
        )
    return schema


def _beside_advice(error: Exception, file: "Path | EntryPoint") -> str:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and not isinstance(file, Path) and file.module.split(".")[0] == name:
        return (
            f"{name} is not installed, nor does it lie beside a folder {PACKAGE}/. For code of "
            f"your own write {PACKAGE}/{name}.py, with a class Config, and `experiment: {name}`"
        )
    if not name or not isinstance(file, Path) or name.split(".")[0] not in _local(file.parent):
        return ""
    return f"{name} lies beside the experiment: write `from {PACKAGE}.{name} import ...`"


def _directories(config: Path) -> tuple[Path | None, list[Path]]:
    """Return the nearest `experiments` above a config or the current directory, and those skipped.

    Whoever made a run may have put code into it: a run's directory and the one that holds it are
    skipped, and all of runs/.
    """
    here, path = Path.cwd(), Path(os.path.abspath(config))
    skipped = {*path.parents[:2]} - {here} if is_run(path.parent) else set()
    found = [p for p in (*path.parents, here, *here.parents) if (p / PACKAGE).is_dir()]
    trusts = lambda p: p not in skipped and not in_runs(str(p)) and not in_runs(str(p.resolve()))
    trusted = [p / PACKAGE for p in found if trusts(p)]
    return next(iter(trusted), None), [p / PACKAGE for p in found if not trusts(p)]


def _shown(directory: Path) -> Path:
    here = Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory


def _local(directory: Path | None) -> dict[str, Path]:
    if directory is None:
        return {}
    files = [*directory.glob("*.py"), *directory.glob("*/__init__.py")]
    named = {p.stem if p.stem != "__init__" else p.parent.name: p for p in sorted(files)}
    return {n: p for n, p in named.items() if n.isidentifier() and n != PACKAGE and n[0] != "_"}


def _directory_of(file: Path) -> Path:
    return file.parent.parent if file.stem == "__init__" else file.parent


def _show_package(directory: Path) -> None:
    """Make `experiments` this directory, whatever else of that name is on the path."""
    present = sys.modules.get(PACKAGE)
    if present and list(getattr(present, "__path__", ()))[:1] == [str(directory)]:
        return
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    # Processes that it starts find it too.
    sys.path.insert(0, str(directory.parent))
    importlib.invalidate_caches()
    own = shipped_folder(PACKAGE)
    # Second, so that an experiment may import one that comes with jtrain.
    places = list(dict.fromkeys(map(str, filter(None, (directory, own)))))
    file = directory / "__init__.py"
    if not file.exists():
        sys.modules[PACKAGE] = module = ModuleType(PACKAGE)
        module.__path__ = places
        return
    spec = spec_from_file_location(PACKAGE, file, submodule_search_locations=places)
    assert spec, f"{file} ends in .py, so there is a loader for it"
    assert spec.loader, f"{file} ends in .py, so there is a loader for it"
    sys.modules[PACKAGE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _inside(error: Exception) -> str:
    """Return the traceback from the first frame of the experiment's own code."""
    frames = error.__traceback__
    while frames and not _theirs(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _theirs(file: str) -> bool:
    return file != __file__ and not file.startswith("<frozen") and "importlib" not in file
