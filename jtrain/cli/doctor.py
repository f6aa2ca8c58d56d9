"""`jtrain doctor`: what is wrong with this machine, before anything is trained."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.errors import DONE, MISTAKE, UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.inspect.doctor.checks import count_status, format_findings
from jtrain.inspect.doctor.examine import CHECKS, Examination, examine


def main(argv: Sequence[str]) -> int:
    """Print a line for each finding; return the exit code: 2 if something must be fixed."""
    args = _arguments().parse(argv)
    if args.timeout <= 0:
        raise UserError("jtrain doctor: --timeout is a number of seconds; write --timeout 60")
    found = examine(Path(args.directory), only=_checks(args.only), timeout=args.timeout)
    if args.json:
        print(json.dumps(found.plain()))
    elif found.process == 0:
        print(_format(found))
    else:  # of several processes, the first one prints what is well
        faults = [finding for finding in found.findings if finding.status != "ok"]
        if faults:
            print(f"process {found.process}:\n{format_findings(faults)}", file=sys.stderr)
    return DONE if found.ok else MISTAKE


def _format(found: Examination) -> str:
    errors, warnings = (count_status(found.findings, each) for each in ("error", "warning"))
    verdict = "nothing stands in the way"
    if errors:
        verdict = f"{errors} error{'s' * (errors > 1)} to be fixed"
    also = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    return f"{format_findings(found.findings)}\n\n{verdict}{also} ({found.seconds:.1f} s)"


def _checks(text: str) -> Sequence[str]:
    names = text.split(",") if text else list(CHECKS)
    for name in names:
        if name not in CHECKS:
            raise UserError(
                f"jtrain doctor: --only {name} is not a check; the checks are "
                f"{', '.join(CHECKS)}{did_you_mean(name, CHECKS)}"
            )
    return names


def _arguments() -> Arguments:
    parser = Arguments(
        "doctor",
        "Examine this machine before anything is trained: packages that do not fit together,\n"
        "devices and why a GPU or a TPU is not used, the disk of the runs, the variables of the\n"
        "cluster. Each error or warning ends with a line to type. It needs no network, and leaves\n"
        "nothing behind.",
        "",
        "--directory /data/runs",
        "--only packages,devices --json",
    )
    words = "the directory of the runs (runs)"
    parser.add_argument("--directory", metavar="DIR", default="runs", help=words)
    words = f"checks to make, with commas between them: {', '.join(CHECKS)}"
    parser.add_argument("--only", metavar="CHECK,...", default="", help=words)
    words = "seconds for the devices to start, and for the disk to answer (60)"
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help=words)
    parser.add_json()
    return parser
