"""A folder as Hugging Face lays it out: config.json and safetensors."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jtrain.errors import CheckpointError
from jtrain.io.regular_files import read_json
from jtrain.io.safetensors import INDEX_SUFFIX, SUFFIX, read_tensors
from jtrain.models.pretrained.family import HFConfig

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OF_TRAINING = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
PART = re.compile(r"(.+)-\d+-of-(\d+)")  # a name of one of several files of weights


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of a published model, or what is left of one."""
    return (path / CONFIG).is_file()


def read_config(folder: Path, name: str = CONFIG) -> HFConfig:
    """Return the content of config.json, or of another file of a folder.

    Raises:
        CheckpointError: if it is missing or no JSON object.
    """
    path = folder / name
    try:
        found = read_json(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Name a folder whose files can be: "
            f"{CONFIG}, tensors as {SUFFIX} and tokenizer.json."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}). Download it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a JSON object. "
                              f"Download it again.")  # fmt: skip
    return found


def read_folder(folder: Path) -> Mapping[str, np.ndarray]:
    """Map the tensors of a folder; the disk is read where a slice is used.

    Raises:
        CheckpointError: if there are none, several sets, only pickles, or a file is broken.
    """
    if (folder / ADAPTER).is_file():  # `transformers` would add it
        raise CheckpointError(
            f"{folder} has an {ADAPTER}, and its adapter would be left out. Merge it into the "
            f"weights (merge_and_unload of the package peft), or remove that file."
        )
    for name in (f"model{SUFFIX}", f"model{INDEX_SUFFIX}"):  # in the order of `transformers`
        if (folder / name).is_file():
            return read_tensors(folder / name)
    files = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    if len(files) == 1:
        return read_tensors(files[0])
    if files:
        raise CheckpointError(
            f"{folder} has {', '.join(path.name for path in files)} and no model{INDEX_SUFFIX} "
            f"that says which tensor is in which. Download the index, too."
        )
    if pickles := _weight_pickles(folder):
        check_no_pickle(pickles[0])
    raise CheckpointError(
        f"{folder} has a {CONFIG} and no file of tensors. Download model{SUFFIX}."
    )


def check_no_pickle(path: Path) -> None:
    """Raise CheckpointError if a path is named as torch names pickles."""
    if path.suffix in PICKLES:
        part = PART.fullmatch(path.stem)
        pattern = f"{part[1]}-*-of-{part[2]}{path.suffix}" if part else path.name
        raise CheckpointError(
            f"{path} is a pickle, and reading a pickle runs any program that is in it: jtrain "
            f"reads none. Convert it once, with torch's restricted reader:\n"
            f'python -c "import pathlib, torch, safetensors.torch as s; '
            f"s.save_file({{k: v.clone().contiguous() "
            f"for p in pathlib.Path('{path.parent}').glob('{pattern}') "
            f"for k, v in torch.load(p, weights_only=True).items()}}, "
            f"'{path.with_name(f'model{SUFFIX}')}')\""
        )


def _weight_pickles(folder: Path) -> list[Path]:
    """Return the pickles that may hold weights, torch's name for them first."""
    files = [path for path in folder.iterdir() if path.suffix in PICKLES]
    weights = [path for path in files if not path.name.startswith(OF_TRAINING)]
    return sorted(weights, key=lambda path: (not path.name.startswith("pytorch_model"), path))
