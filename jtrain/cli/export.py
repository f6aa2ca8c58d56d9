"""`jtrain export RUN --to hf | safetensors | stablehlo OUT`: a trained model for other programs."""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.cli.arguments import Arguments, find_config, parse_step
from jtrain.cli.output import print_text as print
from jtrain.errors import CheckpointError, UserError
from jtrain.io.formatting import format_bytes
from jtrain.io.hub import push_folder
from jtrain.io.object_store import check_local_path

FORMATS = {
    "hf": "a folder that transformers, vLLM and llama.cpp's converter load",
    "peft": "the adapter of a run with lora, which the package peft loads",
    "safetensors": "one file of the parameters, under jtrain's names",
    "stablehlo": "a folder with the compiled function of the model, by jax.export, and its weights",
}


def main(argv: Sequence[str]) -> int:
    """Write the model; return the exit code."""
    args = _arguments().parse(argv)
    _check_options(args)

    import jax

    jax.config.update("jax_platforms", "cpu")  # leave the accelerator to a run that may be training
    writers = {"hf": _hf, "peft": _peft, "safetensors": _safetensors, "stablehlo": _stablehlo}
    write = writers[args.to]
    with contextlib.nullcontext(args.out) if args.out else tempfile.TemporaryDirectory() as out:
        given, args.out = args.out, out
        found, text = write(args)
        if args.push:
            url = push_folder(Path(out), args.push, private=args.private)
            found |= {"directory": given, "url": url}
            text = f"{text if given else text.replace(out, args.push)}\n{url}"
    print(json.dumps(found) if args.json else text)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that do not go together."""
    check_local_path(args.out, "jtrain export: OUT")
    if not (args.out or args.push):
        raise UserError(
            f"jtrain export: OUT is missing: jtrain export {args.run} OUT --to {args.to}"
        )
    for option, formats in {"dtype": ["hf"], "push": ["hf", "peft"]}.items():
        if getattr(args, option) and args.to not in formats:
            raise UserError(
                f"jtrain export: --{option} is for --to {' and '.join(formats)}. Leave it out, or "
                f"write --to hf (found --to {args.to})"
            )
    if args.private and not args.push:
        raise UserError("jtrain export: --private is for --push; write --push ME/NAME --private")


def export_safetensors(
    directory: Path, step: int, out: Path, *, everything: bool
) -> tuple[dict[str, Any], str]:
    """Write the leaves of a checkpoint as one file; return what was written, and a line about it.

    Raises:
        UserError: if the checkpoint has no parameters, and not everything was requested.
    """
    from jtrain.checkpoint import inspect, layout
    from jtrain.io.safetensors import write_safetensors

    layout.check_valid(directory, step)
    leaves = layout.read_record(directory, step)["leaves"]
    names = _exported_names(leaves, everything)
    if not names:
        raise UserError(
            f"{directory / str(step)} has no leaf params/..., only {', '.join(list(leaves)[:5])}; "
            f"for every leaf write jtrain ckpt export {directory.parent} --all"
        )
    read = inspect.read_arrays(directory, step, list(names.values()))
    tensors = {key: read[names[key]] for key in sorted(names)}
    about = {"step": str(step), "from": str(directory), "format": "np"}
    size = write_safetensors(out, tensors, about)
    found = {"out": str(out), "step": step, "tensors": len(tensors), "bytes": size}
    return found, f"{out}: {len(tensors)} tensors of step {step}, {format_bytes(size)}"


def _exported_names(leaves: Mapping[str, str], everything: bool) -> dict[str, str]:
    """Return the stored name of each exported leaf by its exported name: dots for slashes.

    Args:
        everything: include the optimizer and the keys; otherwise only parameters and extra/.
    """
    if everything:
        return {name.replace("/", "."): name for name in leaves}
    prefix = "params/"
    params = {name.removeprefix(prefix): name for name in leaves if name.startswith(prefix)}
    extra = {name: name for name in leaves if name.startswith("extra/")}
    return {exported.replace("/", "."): name for exported, name in {**params, **extra}.items()}


def _safetensors(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from jtrain.checkpoint import layout
    from jtrain.train.export import has_terms

    directory, step = _checkpoint(args)
    layout.check_valid(directory, step)
    if has_terms(layout.read_record(directory, step)["leaves"]):
        raise UserError(
            f"jtrain export: {args.run} was trained with lora, so its parameters are low-rank "
            f"terms beside frozen weights, which other programs do not add up. Write the sum: "
            f"jtrain export {args.run} {Path(args.out).with_suffix('')} --to hf, or in Python "
            f"jt.load({args.run!r}).merged. The leaves as they are: jtrain ckpt export {args.run}"
        )
    return export_safetensors(directory, step, Path(args.out), everything=False)


def _hf(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from jtrain.train.export import export_hf

    directory, step = _checkpoint(args)
    config = find_config(args.run, "export")
    done = export_hf(config, directory, step, Path(args.out), args.dtype)
    missing = "" if done.of_images else ", without a tokenizer"
    copied = f", with {', '.join(done.copied)}" if done.copied else missing
    found = {**done._asdict(), "directory": str(done.directory), "step": step}
    return found, (
        f"{done.directory}: {done.family} of step {step}, {done.tensors} tensors of {done.dtype}, "
        f"{format_bytes(done.bytes)}{copied}"
    )


def _peft(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from jtrain.train.export import export_peft

    directory, step = _checkpoint(args)
    size = export_peft(find_config(args.run, "export"), directory, step, Path(args.out))
    found = {"directory": str(args.out), "step": step, "bytes": size}
    return found, f"{args.out}: adapter of step {step}, {format_bytes(size)}"


def _stablehlo(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from jtrain.train.export import export_stablehlo

    found = export_stablehlo(args.run, parse_step(args.step, "export"), Path(args.out))
    inputs = ", ".join(f"{name} {shape}" for name, shape in found["inputs"].items())
    return found, f"{args.out}: step {found['step']}, takes {inputs}, for {found['platforms']}"


def _checkpoint(args: argparse.Namespace) -> tuple[Path, int]:
    """Return the directory and the step of the requested checkpoint."""
    from jtrain.checkpoint import inspect
    from jtrain.train.run_dir import RunDir

    directory, named = inspect.find_checkpoint(args.run)
    if named is not None:
        raise CheckpointError(
            f"jtrain export: {args.run} is a checkpoint, and the run has the config of the model. "
            f"Write the run: jtrain export {directory.parent} --step {named}"
        )
    step = parse_step(args.step, "export")
    return directory, inspect.resolve_step(directory, step, RunDir(directory.parent).owner())


def _arguments() -> Arguments:
    parser = Arguments(
        "export",
        "Write the parameters of a trained run for other programs.\n"
        + "\n".join(f"  --to {name:12} {words}" for name, words in FORMATS.items()),
        "chat --to hf chat-hf",
        "chat --to hf chat-hf --dtype bfloat16 --step best",
        "chat --to hf --push me/chat --private",
        "digits --to stablehlo digits-served",
        "shakespeare --to safetensors shakespeare.safetensors",
    )
    parser.add_run()
    words = "the new folder, or file of tensors; may be left out with --push"
    parser.add_argument("out", metavar="OUT", nargs="?", default="", help=words)
    parser.add_argument("--to", choices=list(FORMATS), required=True, help="the format")
    parser.add_step()
    words = "of the tensors; default that of the model in model.from, or float32"
    choices = ["", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="", choices=choices, metavar="TYPE", help=words)
    words = "also upload the folder to a model on the Hugging Face Hub; by the token in HF_TOKEN"
    parser.add_argument("--push", default="", metavar="ORG/NAME", help=words)
    words = "visibility of a new model; default the Hub's for its owner, which is public"
    parser.add_argument("--private", action="store_true", help=words)
    parser.add_json()
    return parser
