"""The experiments and configs that come with jtrain: in the wheel, or in the clone."""

from pathlib import Path

_JTRAIN = Path(__file__).parents[1]
YAML = (".yaml", ".yml")


def shipped_folder(folder: str) -> Path | None:
    """Return the directory of jtrain's own `experiments` or `configs`, None if it is not there."""
    clone = _JTRAIN.parent
    if (_JTRAIN / "shipped" / folder).is_dir():
        return _JTRAIN / "shipped" / folder
    is_clone = (clone / "pyproject.toml").is_file() and (clone / folder).is_dir()
    return clone / folder if is_clone else None


def shipped_configs() -> dict[str, Path]:
    """Return the path of each config that comes with jtrain, by its name."""
    directory = shipped_folder("configs")
    return {} if directory is None else {p.stem: p for p in sorted(directory.glob("*.yaml"))}


def find_config(typed: Path | str) -> Path:
    """Return the file that `typed` names: itself, or one of jtrain's own if there is no such file.

    jtrain's own are named plainly (`digits`), or as in the clone (`configs/digits.yaml`).
    """
    path = Path(typed)
    plain = path.parent in {Path(), Path("configs")} and path.suffix in {"", *YAML}
    if not plain or path.is_absolute() or path.exists() or (path.suffix == "" and path.parent.name):
        return path
    return shipped_configs().get(path.stem, path)
