"""`jtrain ckpt ls | verify | show | diff | rm | export | fetch`: inspection of checkpoints."""

import json
from collections.abc import Sequence

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.errors import UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.object_store import check_local_path

DOES = {
    "ls": "list the steps, their sizes, which is newest and best, and which are damaged",
    "verify": "read every byte and compare it with the seal",
    "show": "print the leaves of a checkpoint and its record",
    "diff": "print the leaves that differ between two checkpoints, and by how much",
    "rm": "remove a step, or the damaged ones; never the last valid one unless --force",
    "export": "write the parameters as a .safetensors file",
    "fetch": "fetch a run from an object store, to runs/NAME",
}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; return the exit code, 70 if a checkpoint is damaged."""
    action, *rest = argv or ["--help"]
    if action in {"-h", "--help"}:
        print("\n".join(f"jtrain ckpt {name:7} {what}" for name, what in DOES.items()))
        return 0
    if action not in DOES:
        raise UserError(
            f"jtrain ckpt: {action} is not one of {', '.join(DOES)}{did_you_mean(action, DOES)}; "
            f"write jtrain ckpt ls RUN"
        )
    args = arguments_of(action).parse(rest)

    check_local_path(getattr(args, "out", ""), f"jtrain ckpt {action}: --out")

    import jax

    jax.config.update("jax_platforms", "cpu")  # leave the accelerator to a run that may be training
    from jtrain.cli.ckpt_actions import run_action

    found, text, code = run_action(action, args)
    print(json.dumps(found) if args.json else text)
    return code


def arguments_of(action: str) -> Arguments:
    """Return a parser of the arguments of a subcommand."""
    examples = {
        "ls": ("shakespeare",),
        "verify": ("shakespeare", "runs/shakespeare/checkpoints/400"),
        "show": ("shakespeare --step best",),
        "diff": ("shakespeare shakespeare-2", "runs/a/checkpoints/100 runs/a/checkpoints/200"),
        "rm": ("shakespeare --step 200", "shakespeare --damaged"),
        "export": ("shakespeare --step best --out shakespeare.safetensors",),
        "fetch": ("s3://bucket/runs/shakespeare",),
    }
    codes = {
        "diff": "\nThe exit code is always 0; with --json, `leaves` is empty if none differs.",
        "verify": "\nThe exit code is 70 if a checkpoint is damaged.",
    }
    help_text = f"{DOES[action].capitalize()}.{codes.get(action, '')}"
    parser = Arguments(f"ckpt {action}", help_text, *examples[action])
    run = "a run, its name in runs/, the path of a checkpoint, or s3://bucket/runs/NAME"
    parser.add_argument("run", metavar="RUN", help=run)
    if action == "diff":
        parser.add_argument("other", metavar="RUN", help="the run to compare with")
    if action != "ls":
        step = "newest, best or a number; default all" if action == "verify" else ""
        step = step or ("newest, best or a number" + " (default newest)" * (action != "rm"))
        parser.add_argument("--step", default="", help=step)
    if action == "rm":
        force = "remove the last valid one too"
        parser.add_argument("--force", action="store_true", help=force)
        damaged = "remove all that verify finds damaged, and damaged ones that were set aside"
        parser.add_argument("--damaged", action="store_true", help=damaged)
    if action == "export":
        out = "the file; default RUN-STEP.safetensors in the working directory"
        parser.add_argument("--out", metavar="FILE", default="", help=out)
        everything = "export the optimizer's state and the keys too"
        parser.add_argument("--all", action="store_true", help=everything)
    if action == "fetch":
        out = "the run's directory; default runs/NAME"
        parser.add_argument("--out", metavar="DIRECTORY", default="", help=out)
    parser.add_json()
    return parser
