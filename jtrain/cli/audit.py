"""`jtrain audit RUN`: compute steps of a run again, and check its files against its certificate."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jtrain.cli.arguments import Arguments, find_config
from jtrain.cli.output import is_first_process, print_error, redirect_output
from jtrain.cli.output import print_text as print
from jtrain.config.resolve import resolve
from jtrain.errors import DIFFERS, UserError

if TYPE_CHECKING:
    from jtrain.inspect.debug.audit import AuditedStep, AuditResult


def main(argv: Sequence[str]) -> int:
    """Print what the audit found; return the exit code."""
    args = _arguments().parse(argv)
    if args.steps < 1:
        raise UserError(f"jtrain audit: --steps {args.steps} draws no step; write --steps 3")
    if args.certify and not Path(args.certify).exists():
        raise UserError(f"jtrain audit: no key {args.certify}; make one: ssh-keygen -t ed25519")
    path = find_config(args.run, "audit")
    resolved = resolve(path, args.settings)

    from jtrain.inspect.debug.audit import audit, certify
    from jtrain.train.run_dir import RunDir

    with redirect_output():
        found = audit(
            resolved.config,
            path.parent,
            steps=args.steps,
            seed=args.seed,
            tolerance=args.tolerance,
            log=print_error,
        )
    if is_first_process():
        written = ""
        if args.certify is not None and found.passed:
            key = Path(args.certify) if args.certify else None
            written = str(certify(RunDir(path.parent), key))
            print_error(f"wrote {written}{' and its signature, .sig' if key else ''}")
        plain = {**dataclasses.asdict(found), "passed": found.passed, "written": written}
        print(json.dumps(plain) if args.json else format_audit(found, args.run))
    return 0 if found.passed else DIFFERS


def format_audit(found: "AuditResult", run: str) -> str:
    """Return the result as text."""
    from jtrain.inspect.debug.audit import REACH

    lines = [_step(each) for each in found.steps]
    if found.certificate:
        lines.append(f"certificate: {found.certificate}")
    lines += [f"DIFFERS from the certificate: {fault}" for fault in found.faults]
    if found.beyond:
        lines.append(
            f"{found.beyond} steps, more than {REACH} after a checkpoint, cannot be drawn; "
            f"with checkpoint.every={REACH} checkpoint.keep_every={REACH} all can"
        )
    verdict = "holds" if found.passed else "DIFFERS"
    again = (
        f"the same steps again: jtrain audit {run} --steps {len(found.steps)} --seed {found.seed}"
    )
    return "\n".join([*lines, f"{run} {verdict}, within {found.tolerance:g}; {again}"])


def _step(each: "AuditedStep") -> str:
    since = f"from checkpoint {each.start}" if each.start else "from the beginning"
    if each.fault:
        said = f"DIFFERS in {each.fault}"
    else:
        said = "the same bits" if each.same_bits else f"the same within {each.distance:.1e}"
    return f"step {each.step}, {since}: {said}"


def _arguments() -> Arguments:
    parser = Arguments(
        "audit",
        "Draw steps of a run at random, restore the checkpoint before each, and compute them\n"
        "again, on any machine and layout. The exit code is 1 if the rows, the loss or a norm of\n"
        "a step differ from the run's records, or its files from its certificate.",
        "shakespeare",
        "shakespeare --steps 10 parallel.kind=single",
        "shakespeare --certify ~/.ssh/id_ed25519   sign a certificate of the run",
    )
    parser.add_run(settings="parallel")
    words = "number of steps to draw (3)"
    parser.add_argument("--steps", type=int, default=3, metavar="N", help=words)
    words = "of the drawing; by default another each time"
    parser.add_argument("--seed", type=int, metavar="N", help=words)
    words = "largest relative difference of a number (1e-5 in float32, else 2e-2)"
    parser.add_argument("--tolerance", type=float, metavar="X", help=words)
    words = "write certificate.txt into the run's directory, signed by an SSH key if one is named"
    parser.add_argument("--certify", nargs="?", const="", metavar="KEY", help=words)
    parser.add_json()
    return parser
