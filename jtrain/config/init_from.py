"""Initial parameters from a run, a checkpoint or a file."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass


def _as_many_stars(pair: tuple[str, str]) -> tuple[str, str]:
    in_file, in_model = (name.count("*") for name in pair)
    if in_file == in_model:
        return pair
    raise ValueError(
        f"must have as many * in both names, as each stands for the same text; found {in_file} in "
        f"{pair[0]} and {in_model} in {pair[1]}"
    )


Pattern = Annotated[str, Field(min_length=1)]
Rename = Annotated[tuple[Pattern, Pattern], AfterValidator(_as_many_stars)]


@configclass
class InitFrom:
    """Trained parameters to start from; the optimizer and the step start afresh.

    Read at the first start of a run only: a resumed run has its parameters in its checkpoint.
    """

    path: str = ""
    """A run (its directory, or its NAME in runs/), a checkpoint of one (runs/NAME/checkpoints/400),
    a file of tensors (.safetensors, .safetensors.index.json), or a published model (a folder with
    config.json, a .gguf file); empty: those of model.from, or parameters by the seed."""
    step: Literal["newest", "best"] = "newest"
    """Which checkpoint of a run; the best by its own checkpoint.best."""
    include: tuple[Pattern, ...] = ("*",)
    """Patterns on the names of this model's leaves that are loaded. `*` is any text."""
    exclude: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves that are not loaded and start by the seed."""
    rename: tuple[Rename, ...] = ()
    """Pairs [name in the file, name in the model], such as
    [h/*/ln_1/weight, blocks/*/norm/scale]; the first pair that matches a name counts. Dots in the
    names of tensors are slashes."""
    transpose: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves whose dims are reversed in the file."""
    partial: bool = False
    """Whether leaves that the file lacks start by the seed; else a missing leaf is an error."""
    extra: bool = False
    """Whether the model's other state (running statistics) is loaded too; its leaves are called
    extra/NAME."""
