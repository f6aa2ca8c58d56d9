"""`jtrain museum`: public defects of trainers, how large each is, and what a check says of it."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jtrain.cli.arguments import Arguments
from jtrain.cli.check import make_progress, prepare_cpu
from jtrain.cli.output import print_text as print
from jtrain.errors import DONE
from jtrain.io.formatting import align_columns

if TYPE_CHECKING:
    from jtrain.testing.exhibit import Exhibit

HEAD = ("exhibit", "error", "of the", "jtrain", "jtrain check: comparison, cause", "thread")
LEGEND = (
    "error: relative, of 2 microbatches x 2 devices against one device with the whole batch, in\n"
    "which 3 of 8 rows are hidden; jtrain: that of jtrain's own step. Each formula is ours, after\n"
    "its thread: jtrain museum {name} prints it, the right one and the whole report."
)


def main(argv: Sequence[str]) -> int:
    """Print the table, or one exhibit; return the exit code."""
    args = _arguments().parse(argv)
    prepare_cpu(2)

    from jtrain.testing.museum import EXHIBITS, find_exhibit

    if args.exhibit:
        exhibit = find_exhibit(args.exhibit)
        print(json.dumps(_plain_page(exhibit)) if args.json else _page(exhibit))
        return DONE
    log, records = make_progress(), []
    for exhibit in EXHIBITS:
        log(exhibit.name)
        records.append(_record(exhibit))
    records.sort(key=_size, reverse=True)
    print(json.dumps({"exhibits": records}) if args.json else format_table(records))
    return DONE


def _record(exhibit: "Exhibit") -> dict[str, Any]:
    """Return the errors and the diagnosis as JSON values; an error is null if not finite."""
    (error, ours), found = exhibit.measure(), exhibit.diagnose()
    return {
        "exhibit": exhibit.name,
        "what": exhibit.what,
        "thread": exhibit.thread,
        "status": exhibit.status,
        "error_of": exhibit.error_of,
        "error": error if math.isfinite(error) else None,
        "jtrain": ours,
        "check": found.check,
        "cause": found.cause,
        "why": found.why,
    }


def _size(record: dict[str, Any]) -> float:
    """Return the error, rounded so that equal ones stay in the order of the exhibits."""
    return math.inf if record["error"] is None else float(f"{record['error']:.3g}")


def format_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of the exhibits, with a legend."""
    rows = [
        (
            record["exhibit"],
            "NaN" if record["error"] is None else f"{record['error']:.2g}",
            record["error_of"],
            f"{record['jtrain']:.0e}" if record["jtrain"] else "0",
            f"{record['check']}: {record['cause']}",
            record["thread"],
        )
        for record in records
    ]
    table = "\n".join(align_columns([HEAD, *rows], right={1, 3}))
    return f"{table}\n\n{LEGEND.format(name=rows[0][0])}"


def _page(exhibit: "Exhibit") -> str:
    error, ours = exhibit.measure()
    (wrong, right), report = exhibit.sources(), exhibit.check()
    return "\n\n".join(
        [
            f"{exhibit.name}: {exhibit.what}\n{exhibit.thread} ({exhibit.status})",
            wrong,
            f"The right one:\n\n{right}",
            f"Relative error of the {exhibit.error_of}, 2 microbatches x 2 devices: "
            f"{error:.2g}; jtrain's: {ours:.0e}",
            report.describe(),
        ]
    )


def _plain_page(exhibit: "Exhibit") -> dict[str, Any]:
    wrong, right = exhibit.sources()
    return {
        **_record(exhibit),
        "formula": wrong,
        "right": right,
        "report": exhibit.check().plain(),
    }


def _arguments() -> Arguments:
    parser = Arguments(
        "museum",
        "Print twelve public defects of trainers, each as a formula of our own: the error of its\n"
        "gradient (or of the value that it reports) under 2 microbatches x 2 devices, and what\n"
        "`jtrain check` says of it. Trains nothing; takes a minute on the CPU.",
        "",
        "soup-932",
        "--json",
    )
    words = "an exhibit: print its formula, the right one and the whole report of the check"
    parser.add_argument("exhibit", metavar="EXHIBIT", nargs="?", default="", help=words)
    parser.add_json()
    return parser
